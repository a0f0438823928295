package loopback

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/session"
)

// Agent is a simulated node. It has a real session, and reports every pod as running or deleted
// without running containers.
type Agent struct {
	Name    string
	Servers []string
	Token   string
	Dir     string // for its state
	// Address is the node's internal IP; "" = none. Source is the local address of its connections:
	// nil, or an address on the loopback interface.
	Address string
	Source  net.IP
	Events  bool // also sends an event for each pod
	// CheckpointEvery is session.Config.CheckpointEvery.
	CheckpointEvery time.Duration
	Shared          *session.Shared // may be nil
	Log             *slog.Logger    // may be nil
	// Confirmed is called when a replica has sent the complete state of the session; may be nil.
	Confirmed func()
}

func (a Agent) newSession() *session.Session {
	room := v1.ResourceList{v1.ResourceCPU: resource.MustParse("64"), v1.ResourceMemory: resource.MustParse("64Gi"),
		v1.ResourcePods: resource.MustParse("1000")}
	facts := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: a.Name, Labels: map[string]string{v1.LabelHostname: a.Name}}}
	facts.Status.Capacity, facts.Status.Allocatable = room, room
	if a.Address != "" {
		facts.Status.Addresses = []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: a.Address}}
	}
	cfg := session.Config{
		NodeName: a.Name, Join: session.Join{Servers: a.Servers, Token: a.Token},
		StateDir: filepath.Join(a.Dir, "state"), RunDir: filepath.Join(a.Dir, "run"),
		Facts: facts, Log: a.Log, CheckpointEvery: a.CheckpointEvery, Shared: a.Shared,
	}
	if a.Source != nil {
		from := net.Dialer{LocalAddr: &net.TCPAddr{IP: a.Source}}
		cfg.Dial = func(ctx context.Context, address string) (net.Conn, error) {
			return from.DialContext(ctx, "tcp", address)
		}
	}
	return session.New(cfg)
}

// Run runs the agent until ctx ends, or until the session fails permanently.
func (a Agent) Run(ctx context.Context) error {
	s := a.newSession()
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx); cancel() }()
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { a.reportPods(ctx, s) })
	select {
	case <-s.Confirmed():
		if a.Confirmed != nil {
			a.Confirmed()
		}
	case <-ctx.Done():
	}
	return <-ended
}

// reportPods reports each new pod as running and each pod with a deletion timestamp as gone. It
// behaves like a kubelet whose containers start and stop at once.
func (a Agent) reportPods(ctx context.Context, s *session.Session) {
	running, gone := map[types.UID]bool{}, map[types.UID]bool{}
	started := 0 // pods, over the life of the agent
	for kinds := range s.Changes(ctx) {
		if _, pods := kinds["Pod"]; !pods {
			continue
		}
		there := map[types.UID]bool{}
		for _, p := range s.Pods() {
			there[p.UID] = true
			switch {
			case p.DeletionTimestamp != nil && !gone[p.UID]:
				gone[p.UID] = true
				s.PodGone(p.Namespace, p.Name, p.UID)
			case p.DeletionTimestamp == nil && !running[p.UID]:
				running[p.UID] = true
				started++
				s.PodStatus(runningStatus(p, podAddress(s.Cluster().PodCIDR, p.UID, started)))
				if a.Events {
					s.Event(startedEvent(p, a.Name))
				}
			}
		}
		removeMissing(running, there)
		removeMissing(gone, there)
	}
}

func removeMissing(of, there map[types.UID]bool) {
	for uid := range of {
		if !there[uid] {
			delete(of, uid)
		}
	}
}

// podAddress returns an address for the n-th pod of a node. The control plane rejects an address
// that a pod of another node has. The address is in the reserved range 240.0.0.0/4, to which no
// packets are sent. The node's pod CIDR makes it unique. Without a pod CIDR, the pod's UID makes it
// unlikely that two pods have the same address.
func podAddress(podCIDR string, uid types.UID, n int) string {
	const reserved = 240 << 24
	of := uint32(n & 0xffff)
	if cidr, err := netip.ParsePrefix(podCIDR); err == nil && cidr.Addr().Is4() {
		node := binary.BigEndian.Uint32(cidr.Addr().AsSlice()) >> (32 - cidr.Bits())
		of |= node & 0x7ff << 16
	} else {
		h := fnv.New32a()
		_, _ = h.Write([]byte(uid))
		of = 1<<27 | h.Sum32()&(1<<27-1)
	}
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, reserved|of))).String()
}

// runningStatus returns the reported status of a pod with running containers.
func runningStatus(p *v1.Pod, ip string) *v1.Pod {
	out := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}}
	now := metav1.Now()
	out.Status = v1.PodStatus{Phase: v1.PodRunning, PodIP: ip, StartTime: &now, Conditions: []v1.PodCondition{
		{Type: v1.PodInitialized, Status: v1.ConditionTrue, LastTransitionTime: now},
		{Type: v1.ContainersReady, Status: v1.ConditionTrue, LastTransitionTime: now},
		{Type: v1.PodReady, Status: v1.ConditionTrue, LastTransitionTime: now},
	}}
	for _, c := range p.Spec.Containers {
		out.Status.ContainerStatuses = append(out.Status.ContainerStatuses, v1.ContainerStatus{
			Name: c.Name, Image: c.Image, Ready: true,
			State: v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: now}},
		})
	}
	return out
}

// startedEvent returns the event of a pod with started containers.
func startedEvent(p *v1.Pod, node string) *v1.Event {
	now := metav1.Now()
	return &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name + ".started"},
		InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: p.Namespace,
			Name: p.Name, UID: p.UID},
		Reason: "Started", Message: "Started container c", Type: v1.EventTypeNormal, FirstTimestamp: now,
		LastTimestamp: now, Count: 1,
		Source: v1.EventSource{Component: "agent", Host: node},
	}
}
