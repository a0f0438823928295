// Package podresources serves the kubelet's pod resources API (v1) on a Unix socket, which
// monitoring agents use. It lists the devices of containers that device plugins or ResourceClaims
// provide. The lists of exclusive CPUs and memory are empty, because the agent assigns no exclusive
// CPUs or memory.
package podresources

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"keelson.dev/keelson/agent"
)

// Limits for the clients of the pod resources API. The request rate is that of the kubelet.
const (
	perSecond  = 100 // requests
	atOnce     = 10
	maxClients = 64       // connections
	maxStreams = 8        // concurrent requests per connection
	maxRequest = 4 << 10  // bytes
	maxAnswer  = 16 << 20 // bytes
	idle       = 5 * time.Minute
)

// PluginSource provides the devices that device plugins advertise, and those that pods use.
type PluginSource interface {
	// AllocatedDevices returns the devices of a pod by container and resource.
	AllocatedDevices(pod types.UID) map[string]map[string][]agent.PluginDevice
	// AllocatableDevices returns the devices that can be allocated, by resource. It includes the
	// devices that are allocated already.
	AllocatableDevices() map[string][]agent.PluginDevice
}

// ClaimSource provides the devices that the containers of a pod use through its ResourceClaims, by
// container name.
type ClaimSource interface {
	ContainerClaims(pod *v1.Pod) map[string][]agent.ContainerClaim
}

// Config is the configuration of a Server.
type Config struct {
	Socket  string // path of the Unix socket
	Pods    func() []*v1.Pod
	Plugins PluginSource
	Claims  ClaimSource
}

// Server serves the kubelet's pod resources API on a Unix socket.
type Server struct {
	api.UnimplementedPodResourcesListerServer
	cfg   Config
	limit *rate.Limiter
}

// New returns a Server. It starts nothing.
func New(cfg Config) *Server {
	return &Server{cfg: cfg, limit: rate.NewLimiter(perSecond, atOnce)}
}

// Run serves the API until ctx ends or an error occurs.
func (s *Server) Run(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(s.cfg.Socket), 0o750); err != nil {
		return fmt.Errorf("pod resources: %w", err)
	}
	if err := os.Remove(s.cfg.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) { // left by an earlier process
		return fmt.Errorf("pod resources: %w", err)
	}
	l, err := net.Listen("unix", s.cfg.Socket)
	if err != nil {
		return fmt.Errorf("pod resources: %w", err)
	}
	g := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.MaxSendMsgSize(maxAnswer),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxRequest), grpc.ConnectionTimeout(5*time.Second), grpc.UnaryInterceptor(s.limitRate),
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: idle}))
	api.RegisterPodResourcesListerServer(g, s)
	stop := context.AfterFunc(ctx, g.Stop)
	defer stop()
	if err := g.Serve(netutil.LimitListener(l, maxClients)); err != nil && ctx.Err() == nil {
		return fmt.Errorf("pod resources: %w", err)
	}
	return ctx.Err()
}

// limitRate is a gRPC interceptor that rejects requests beyond the kubelet's rate limit.
func (s *Server) limitRate(ctx context.Context, q any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if !s.limit.Allow() {
		return nil, status.Errorf(codes.ResourceExhausted,
			"rejected by rate limit: at most %d requests per second and %d at once", perSecond, atOnce)
	}
	return next(ctx, q)
}

// List returns the resources of all pods on this node that have not ended. It implements the gRPC
// service PodResourcesLister.
func (s *Server) List(context.Context, *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	out := &api.ListPodResourcesResponse{}
	for _, p := range s.cfg.Pods() {
		if isActive(p) {
			out.PodResources = append(out.PodResources, s.podResources(p))
		}
	}
	slices.SortFunc(out.PodResources, func(a, b *api.PodResources) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out, nil
}

// Get returns the resources of one pod. It implements the gRPC service PodResourcesLister.
func (s *Server) Get(_ context.Context, q *api.GetPodResourcesRequest) (*api.GetPodResourcesResponse, error) {
	for _, p := range s.cfg.Pods() {
		if p.Namespace != q.GetPodNamespace() || p.Name != q.GetPodName() {
			continue
		}
		if !isActive(p) {
			return nil, status.Errorf(codes.NotFound, "pod %s/%s has ended", p.Namespace, p.Name)
		}
		return &api.GetPodResourcesResponse{PodResources: s.podResources(p)}, nil
	}
	return nil, status.Errorf(codes.NotFound, "pod %s/%s is not on this node", truncateText(q.GetPodNamespace()),
		truncateText(q.GetPodName()))
}

// GetAllocatableResources returns the devices of device plugins, whether or not pods use them.
// Devices of DRA drivers are published in ResourceSlices instead. It implements the gRPC service
// PodResourcesLister.
func (s *Server) GetAllocatableResources(context.Context, *api.AllocatableResourcesRequest) (
	*api.AllocatableResourcesResponse, error,
) {
	out := &api.AllocatableResourcesResponse{}
	all := s.cfg.Plugins.AllocatableDevices()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out.Devices = append(out.Devices, groupByNodes(name, all[name])...)
	}
	return out, nil
}

// podResources returns the devices of the containers of a pod that run concurrently: its regular
// containers and sidecars.
func (s *Server) podResources(p *v1.Pod) *api.PodResources {
	out := &api.PodResources{Namespace: p.Namespace, Name: p.Name}
	given, claimed := s.cfg.Plugins.AllocatedDevices(p.UID), s.cfg.Claims.ContainerClaims(p)
	add := func(c *v1.Container) {
		r := &api.ContainerResources{Name: c.Name}
		for _, name := range slices.Sorted(maps.Keys(given[c.Name])) {
			r.Devices = append(r.Devices, groupByNodes(name, given[c.Name][name])...)
		}
		for _, claim := range claimed[c.Name] {
			r.DynamicResources = append(r.DynamicResources, dynamicResource(claim))
		}
		out.Containers = append(out.Containers, r)
	}
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; c.RestartPolicy != nil &&
			*c.RestartPolicy == v1.ContainerRestartPolicyAlways {
			add(c)
		}
	}
	for i := range p.Spec.Containers {
		add(&p.Spec.Containers[i])
	}
	return out
}

// groupByNodes groups the devices of a resource by their sets of NUMA nodes. It returns one entry
// per set, in the order of the sets' first devices.
func groupByNodes(resource string, list []agent.PluginDevice) []*api.ContainerDevices {
	var out []*api.ContainerDevices
	by := map[string]*api.ContainerDevices{}
	for _, d := range list {
		key := fmt.Sprint(d.Nodes)
		e := by[key]
		if e == nil {
			e = &api.ContainerDevices{ResourceName: resource}
			for _, n := range d.Nodes {
				if e.Topology == nil {
					e.Topology = &api.TopologyInfo{}
				}
				e.Topology.Nodes = append(e.Topology.Nodes, &api.NUMANode{ID: n})
			}
			by[key] = e
			out = append(out, e)
		}
		e.DeviceIds = append(e.DeviceIds, d.ID)
	}
	return out
}

func dynamicResource(claim agent.ContainerClaim) *api.DynamicResource {
	out := &api.DynamicResource{ClaimNamespace: claim.Namespace, ClaimName: claim.Name}
	for i := range claim.Devices {
		d := &claim.Devices[i]
		r := &api.ClaimResource{DriverName: d.Driver, PoolName: d.Pool, DeviceName: d.Device}
		if d.ShareID != "" {
			r.ShareId = &d.ShareID
		}
		for _, name := range d.CDI {
			r.CdiDevices = append(r.CdiDevices, &api.CDIDevice{Name: name})
		}
		out.ClaimResources = append(out.ClaimResources, r)
	}
	return out
}

func isActive(p *v1.Pod) bool {
	return !agent.IsTerminalPhase(p.Status.Phase)
}

// truncateText limits the length of a text that comes from a client, for use in an error message.
func truncateText(s string) string {
	const most = 256
	if len(s) > most {
		s = s[:most] + "..."
	}
	return s
}
