package fleet

import (
	"context"
	"errors"
	"io"

	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// Logs implements api.NodeStreams.
func (s *Server) Logs(ctx context.Context, node string, r api.LogRequest) (io.ReadCloser, error) {
	return nil, errors.ErrUnsupported
}

// Exec implements api.NodeStreams.
func (s *Server) Exec(ctx context.Context, node string, r api.ExecRequest, st api.Streams) error {
	return errors.ErrUnsupported
}

// PortForward implements api.NodeStreams.
func (s *Server) PortForward(ctx context.Context, node string, pod types.UID, port int32, conn io.ReadWriteCloser) error {
	return errors.ErrUnsupported
}
