package csi

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// controller responds to GetCapacity with a value, with too much data, never, or with an error.
type controller struct {
	spec.UnimplementedControllerServer
}

func (controller) GetCapacity(ctx context.Context, q *spec.GetCapacityRequest) (*spec.GetCapacityResponse, error) {
	switch q.Parameters["do"] {
	case "hang":
		<-ctx.Done()
		return nil, ctx.Err()
	case "fail":
		return nil, status.Error(codes.ResourceExhausted, "the disk is full")
	}
	return &spec.GetCapacityResponse{AvailableCapacity: 42}, nil
}

func (controller) ControllerGetVolume(context.Context, *spec.ControllerGetVolumeRequest) (
	*spec.ControllerGetVolumeResponse, error,
) {
	return &spec.ControllerGetVolumeResponse{Volume: &spec.Volume{VolumeId: strings.Repeat("x", 2*MaxCall)}}, nil
}

// Calls are forwarded to a driver with its responses. Calls of the Node service, calls that are too
// large, and calls that hang fail.
func TestCall(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	spec.RegisterIdentityServer(g, driver{name: "b.example"})
	spec.RegisterNodeServer(g, driver{name: "b.example"})
	spec.RegisterControllerServer(g, controller{})
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	d, err := Dial(t.Context(), filepath.Join(dir, "other.sock"))
	if err != nil {
		t.Fatal(err)
	}
	r := NewRegistry(RegistryConfig{Plugins: dir, Registration: dir})
	r.drivers["b.example"] = d
	ask := func(what string) []byte {
		b, err := proto.Marshal(&spec.GetCapacityRequest{Parameters: map[string]string{"do": what}})
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const capacity = "/csi.v1.Controller/GetCapacity"
	b, err := r.Call(t.Context(), "b.example", capacity, ask(""), 0)
	var res spec.GetCapacityResponse
	if err != nil || proto.Unmarshal(b, &res) != nil || res.AvailableCapacity != 42 {
		t.Errorf("a call: %v, %v", &res, err)
	}
	for _, c := range []struct {
		name, driver, method string
		request              []byte
		want                 codes.Code
	}{
		{"the driver's error", "b.example", capacity, ask("fail"), codes.ResourceExhausted},
		{"a driver that hangs", "b.example", capacity, ask("hang"), codes.DeadlineExceeded},
		{"the Node service", "b.example", "/csi.v1.Node/NodeUnpublishVolume", nil, codes.PermissionDenied},
		{"another service", "b.example", "/grpc.health.v1.Health/Check", nil, codes.PermissionDenied},
		{"a method that is none", "b.example", "/csi.v1.Controller/Nothing", nil, codes.Unimplemented},
		{"too large a request", "b.example", capacity, make([]byte, MaxCall+1), codes.ResourceExhausted},
		{"too large an answer", "b.example", "/csi.v1.Controller/ControllerGetVolume", nil, codes.ResourceExhausted},
		{"no request", "b.example", capacity, []byte{0xff}, codes.Internal},
	} {
		limit := time.Duration(0) // the default timeout; only the call that hangs needs a short one
		if c.want == codes.DeadlineExceeded {
			limit = 100 * time.Millisecond
		}
		if _, err := r.Call(t.Context(), c.driver, c.method, c.request, limit); status.Code(err) != c.want {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if _, err := r.Call(t.Context(), "none.example", capacity, nil, 0); !errors.Is(err, ErrNoDriver) ||
		!strings.Contains(err.Error(), dir) {
		t.Errorf("a driver that is not there: %v", err)
	}
}
