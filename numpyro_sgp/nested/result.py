class Nested:
    def __init__(self, field, nodes, args, kwargs, seconds):
        self.field, self.nodes, self.args, self.kwargs, self.seconds = field, nodes, args, kwargs, seconds
