package network

import (
	"context"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/version"
)

// executor runs plugins as libcni does, with an environment for programs that live a few milliseconds: the plugins of
// the CNI project are Go programs, for which starting more threads and collecting garbage costs more than it brings.
// To others the variables mean nothing. A plugin hands them on to the one that manages its addresses.
type executor struct {
	invoke.RawExec
	version.PluginDecoder
}

var brief = []string{"GOMAXPROCS=1", "GOGC=off"}

// ExecPlugin implements invoke.Exec.
func (e *executor) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	return e.RawExec.ExecPlugin(ctx, path, stdin, append(environ, brief...))
}
