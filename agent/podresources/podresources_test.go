package podresources

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
)

type plugins map[types.UID]map[string]map[string][]agent.PluginDevice

func (p plugins) AllocatedDevices(uid types.UID) map[string]map[string][]agent.PluginDevice {
	return p[uid]
}

func (p plugins) AllocatableDevices() map[string][]agent.PluginDevice {
	return map[string][]agent.PluginDevice{"example.com/b": {{ID: "z"}},
		"example.com/a": {{ID: "0", Nodes: []int64{0}}, {ID: "1", Nodes: []int64{0, 1}}, {ID: "2", Nodes: []int64{0}}}}
}

type claims map[types.UID]map[string][]agent.ContainerClaim

func (c claims) ContainerClaims(p *v1.Pod) map[string][]agent.ContainerClaim { return c[p.UID] }

func pod(ns, name string, phase v1.PodPhase) *v1.Pod {
	always := v1.ContainerRestartPolicyAlways
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, UID: types.UID(name)},
		Status: v1.PodStatus{Phase: phase},
		Spec: v1.PodSpec{InitContainers: []v1.Container{{Name: "init"}, {Name: "side", RestartPolicy: &always}},
			Containers: []v1.Container{{Name: "app"}}}}
}

// serve returns a client of a server that runs until the test ends.
func serve(t *testing.T) (api.PodResourcesListerClient, *Server) {
	t.Helper()
	dir, err := os.MkdirTemp("", "pr")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "pod-resources", "kubelet.sock")
	s := New(Config{Socket: socket, Pods: func() []*v1.Pod {
		return []*v1.Pod{pod("ns", "user", v1.PodRunning), pod("a", "other", v1.PodPending),
			pod("ns", "done", v1.PodSucceeded), pod("ns", "failed", v1.PodFailed)}
	}, Plugins: plugins{"user": {"app": {"example.com/a": {{ID: "1", Nodes: []int64{0, 1}}, {ID: "2"}}},
		"side": {"example.com/b": {{ID: "z"}}}}},
		Claims: claims{"user": {"app": {{Namespace: "ns", Name: "c",
			Devices: []agent.ClaimedDevice{{Driver: "d", Pool: "p", Device: "gpu-0", ShareID: "s",
				CDI: []string{"v/c=1", "v/c=2"}}}}}}}})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("it ended: %v", err)
		}
	})
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		cancel()
		running.Wait()
		if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket is left: %v", err)
		}
		os.RemoveAll(dir)
	})
	return api.NewPodResourcesListerClient(conn), s
}

func same(t *testing.T, got, want proto.Message, err error, text string) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if err := prototext.Unmarshal([]byte(text), want); err != nil {
		t.Fatal(err)
	}
	if !proto.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

const user = `name: "user" namespace: "ns"
	containers: {name: "side" devices: {resource_name: "example.com/b" device_ids: "z"}}
	containers: {name: "app" devices: {resource_name: "example.com/a" device_ids: "1" topology: {nodes: {ID: 0} nodes: {ID: 1}}} devices: {resource_name: "example.com/a" device_ids: "2"}
	  dynamic_resources: {claim_name: "c" claim_namespace: "ns" claim_resources: {driver_name: "d" pool_name: "p" device_name: "gpu-0" share_id: "s" cdi_devices: {name: "v/c=1"} cdi_devices: {name: "v/c=2"}}}}`

// The responses list the devices of plugins and of claims for each container that may run, of pods
// that have not ended.
func TestAnswers(t *testing.T) {
	c, _ := serve(t)
	list, err := c.List(t.Context(), &api.ListPodResourcesRequest{})
	same(t, list, &api.ListPodResourcesResponse{}, err,
		`pod_resources: {name: "other" namespace: "a" containers: {name: "side"} containers: {name: "app"}} `+
			`pod_resources: {`+user+`}`)
	one, err := c.Get(t.Context(), &api.GetPodResourcesRequest{PodNamespace: "ns", PodName: "user"})
	same(t, one, &api.GetPodResourcesResponse{}, err, `pod_resources: {`+user+`}`)
	all, err := c.GetAllocatableResources(t.Context(), &api.AllocatableResourcesRequest{})
	same(t, all, &api.AllocatableResourcesResponse{}, err,
		`devices: {resource_name: "example.com/a" device_ids: ["0", "2"] topology: {nodes: {ID: 0}}}
		devices: {resource_name: "example.com/a" device_ids: "1" topology: {nodes: {ID: 0} nodes: {ID: 1}}} devices: {resource_name: "example.com/b" device_ids: "z"}`)
	for name, want := range map[string]string{"done": "pod ns/done has ended", "x": "pod ns/x is not on this node"} {
		if _, err := c.Get(t.Context(), &api.GetPodResourcesRequest{PodNamespace: "ns",
			PodName: name}); status.Code(err) != codes.NotFound || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A client that sends too many requests is rejected with one sentence and accepted again later. A
// request with too many bytes is rejected. Many idle clients do not exclude others permanently.
func TestHostileClients(t *testing.T) {
	c, s := serve(t)
	refused := 0
	for range 500 {
		switch _, err := c.List(t.Context(), &api.ListPodResourcesRequest{}); {
		case status.Code(err) == codes.ResourceExhausted &&
			strings.Contains(err.Error(), "rejected by rate limit: at most 100 requests per second and 10 at once"):
			refused++
		case err != nil:
			t.Fatal(err)
		}
	}
	// the limiter itself rejects the eleventh request at the same time, however slow the machine is
	now := time.Now()
	for range atOnce {
		s.limit.AllowN(now, 1)
	}
	if s.limit.AllowN(now, 1) {
		t.Error("there is no limit")
	}
	t.Logf("%d of 500 refused", refused)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := wait.For(ctx, 10*time.Millisecond, func() error {
		_, err := c.Get(ctx, &api.GetPodResourcesRequest{PodNamespace: "ns", PodName: strings.Repeat("x", maxRequest)})
		if status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max") {
			return nil
		}
		return fmt.Errorf("a huge question: %w", err)
	}); err != nil {
		t.Error(err)
	}
	await.Until(ctx, t, await.Patience, 10*time.Millisecond, "a response after the refused requests", func() error {
		_, err := c.List(ctx, &api.ListPodResourcesRequest{})
		return err
	})
}
