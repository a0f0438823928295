package stream

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
	driverTimeout    = 2 * time.Minute // timeout of one call
	maxDriverMessage = 1 << 20         // maximum size of a request or response in bytes
	maxDriverError   = 4 << 10         // maximum length of a driver's error message in bytes
)

// CallDriver implements api.NodeDrivers: it calls a CSI driver on a node through a tunnel. confirm
// is called when the node is connected, immediately before the call of the driver. If confirm
// returns an error, the driver is not called.
func (s *Server) CallDriver(ctx context.Context, node, driver, method string, request []byte,
	confirm func(context.Context) error) ([]byte, error) {
	if len(request) > maxDriverMessage {
		return nil, status.Errorf(codes.InvalidArgument, "a request of %d bytes for CSI driver %s: %d are allowed",
			len(request), driver, maxDriverMessage)
	}
	ctx, cancel := context.WithTimeout(ctx, driverTimeout)
	defer cancel()
	ask := &fleetv1.DriverAsk{Driver: driver, Method: method, Request: request}
	if end, ok := ctx.Deadline(); ok {
		ask.TimeoutNano = int64(time.Until(end))
	}
	unreached := func(err error) error { return fmt.Errorf("calling CSI driver %s on node %s: %w", driver, node, err) }
	c, err := s.standbyOf(ctx, node)
	if err != nil {
		return nil, unreached(err)
	}
	// The wait for the node may have been long. Immediately after confirm, the call is sent.
	if err := confirm(ctx); err != nil {
		return nil, err
	}
	t, err := s.openTunnelOver(ctx, c, node, &fleetv1.TunnelAsk{Kind: &fleetv1.TunnelAsk_Driver{Driver: ask}})
	if err != nil {
		return nil, unreached(err)
	}
	defer t.closeTunnel()
	f, err := t.receiveFrame()
	if err != nil {
		return nil, unreached(err)
	}
	a := f.GetDriverAnswer()
	switch {
	case a == nil && f.GetExit() != nil:
		return nil, unreached(fmt.Errorf("its agent does not support calls of CSI drivers: %w", exitError(f.GetExit())))
	case a == nil:
		return nil, unreached(fmt.Errorf("its agent answered with %T", f.Kind))
	}
	a.Message = a.Message[:min(len(a.Message), maxDriverError)]
	switch {
	case a.Missing:
		return nil, &api.DriverMissing{Node: node, Message: a.Message}
	case a.Code != 0:
		return nil, status.Error(codes.Code(a.Code), a.Message)
	case len(a.Response) > maxDriverMessage:
		return nil, unreached(fmt.Errorf("its answer has %d bytes: %d are allowed", len(a.Response), maxDriverMessage))
	}
	return a.Response, nil
}
