package csi

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// MaxCall bounds the request and the answer of a call that is passed on, in bytes.
const MaxCall = 1 << 20

// Call passes one call of the Identity, the Controller or the GroupController service on to a driver of this node, encoded as it is. Calls of
// the Node service are the node's own and are refused. timeout 0, and what is longer than two minutes, is two minutes.
// The error is ErrNoDriver with where the driver was looked for, or what gRPC says.
func (r *Registry) Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) ([]byte, error) {
	service := method[:strings.LastIndex(method, "/")+1]
	if !slices.Contains([]string{"/csi.v1.Controller/", "/csi.v1.GroupController/", "/csi.v1.Identity/"}, service) {
		return nil, status.Errorf(codes.PermissionDenied, "%q is no call of a driver's Controller, GroupController or Identity service", method)
	}
	if len(request) > MaxCall {
		return nil, status.Errorf(codes.ResourceExhausted, "a request of %d bytes for CSI driver %s: %d are allowed", len(request), driver, MaxCall)
	}
	d, err := r.Driver(ctx, driver)
	if err != nil {
		return nil, err
	}
	if timeout <= 0 || timeout > callLimit {
		timeout = callLimit
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var out []byte
	err = d.conn.Invoke(ctx, method, &request, &out, grpc.ForceCodec(encoded{}), grpc.MaxCallRecvMsgSize(MaxCall), grpc.MaxCallSendMsgSize(MaxCall))
	return out, err
}

// encoded passes on what is encoded already.
type encoded struct{}

func (encoded) Marshal(v any) ([]byte, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("a call passed on holds %T", v)
	}
	return *b, nil
}

func (encoded) Unmarshal(data []byte, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("a call passed on holds %T", v)
	}
	*b = append([]byte(nil), data...)
	return nil
}

func (encoded) Name() string { return "proto" }
