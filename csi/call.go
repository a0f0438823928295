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

// MaxCall is the maximum size in bytes of the request and of the response of Registry.Call.
const MaxCall = 1 << 20

// Call forwards one gRPC call to the named CSI driver of this node, and returns the response.
// request and the response are encoded messages. Only methods of the Identity, Controller, and
// GroupController services are allowed, because the agent itself calls the Node service. A timeout
// of 0, or of more than two minutes, means two minutes. The error is a gRPC status, or wraps
// ErrNoDriver and lists the searched folders.
func (r *Registry) Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) (
	[]byte, error,
) {
	service := method[:strings.LastIndex(method, "/")+1]
	if !slices.Contains([]string{"/csi.v1.Controller/", "/csi.v1.GroupController/", "/csi.v1.Identity/"}, service) {
		return nil, status.Errorf(codes.PermissionDenied,
			"%q is not a call of a driver's Controller, GroupController or Identity service", method)
	}
	if len(request) > MaxCall {
		return nil, status.Errorf(codes.ResourceExhausted, "a request of %d bytes for CSI driver %s: %d are allowed",
			len(request), driver, MaxCall)
	}
	d, err := r.Driver(ctx, driver)
	if err != nil {
		return nil, err
	}
	if timeout <= 0 || timeout > callTimeout {
		timeout = callTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var out []byte
	err = d.conn.Invoke(ctx, method, &request, &out, grpc.ForceCodec(rawCodec{}), grpc.MaxCallRecvMsgSize(MaxCall),
		grpc.MaxCallSendMsgSize(MaxCall))
	return out, err
}

// rawCodec is a gRPC codec that passes messages of type *[]byte unchanged. These messages are
// already encoded.
type rawCodec struct{}

func (rawCodec) Marshal(v any) ([]byte, error) {
	b, ok := v.(*[]byte)
	if !ok {
		return nil, fmt.Errorf("a forwarded call contains %T", v)
	}
	return *b, nil
}

func (rawCodec) Unmarshal(data []byte, v any) error {
	b, ok := v.(*[]byte)
	if !ok {
		return fmt.Errorf("a forwarded call contains %T", v)
	}
	*b = append([]byte(nil), data...)
	return nil
}

func (rawCodec) Name() string { return "proto" }
