package nodegateway

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

const (
	driverPatience = 2 * time.Minute // timeout of one call
	driverMessage  = 1 << 20         // maximum bytes of a request or response
	driverWords    = 4 << 10         // maximum bytes of a driver's error message that are passed on
)

var _ api.NodeDrivers = (*Server)(nil)

// CallDriver implements api.NodeDrivers: it calls a CSI driver on a node through a tunnel. confirm
// runs after the node's connection is found and immediately before the call; its error cancels the
// call.
func (s *Server) CallDriver(ctx context.Context, node, driver, method string, request []byte, confirm func(context.Context) error) ([]byte, error) {
	if len(request) > driverMessage {
		return nil, status.Errorf(codes.InvalidArgument, "a request of %d bytes for CSI driver %s: %d are allowed", len(request), driver, driverMessage)
	}
	ctx, cancel := context.WithTimeout(ctx, driverPatience)
	defer cancel()
	ask := &fleetv1.DriverAsk{Driver: driver, Method: method, Request: request}
	if end, ok := ctx.Deadline(); ok {
		ask.TimeoutNano = int64(time.Until(end))
	}
	unreached := func(err error) error { return fmt.Errorf("calling CSI driver %s on node %s: %w", driver, node, err) }
	b, err := s.standby(ctx, node)
	if err != nil {
		return nil, unreached(err)
	}
	// The wait for the node may have been long. After confirm, the call is sent.
	if err := confirm(ctx); err != nil {
		return nil, err
	}
	t, err := s.openBy(ctx, b, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Driver{Driver: ask}})
	if err != nil {
		return nil, unreached(err)
	}
	defer t.close()
	f, err := t.recv()
	if err != nil {
		return nil, unreached(err)
	}
	a := f.GetDriverAnswer()
	switch {
	case a == nil && f.GetExit() != nil:
		return nil, unreached(fmt.Errorf("its agent does not pass calls on: %w", exit(f.GetExit())))
	case a == nil:
		return nil, unreached(fmt.Errorf("its agent answered with %T", f.Kind))
	}
	a.Message = a.Message[:min(len(a.Message), driverWords)]
	switch {
	case a.Missing:
		return nil, &api.DriverMissing{Node: node, Message: a.Message}
	case a.Code != 0:
		return nil, status.Error(codes.Code(a.Code), a.Message)
	case len(a.Response) > driverMessage:
		return nil, unreached(fmt.Errorf("its answer has %d bytes: %d are allowed", len(a.Response), driverMessage))
	}
	return a.Response, nil
}
