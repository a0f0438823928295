package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Cluster simulates a session in memory: it implements agent.Objects and agent.Reporter. A reported
// status is written into the pod that Pods returns, as the control plane would do. Use NewCluster;
// the zero value is not usable.
type Cluster struct {
	Clock Clock
	About agent.Cluster // result of the method Cluster

	mu          sync.Mutex
	objects     map[string]any // "Kind/namespace/name"
	revision    uint64
	watchers    map[chan map[string]struct{}]map[string]struct{}
	followers   map[chan agent.ObjectChanges]func(agent.ObjectKey) bool
	synced      chan struct{}
	unconfirmed chan struct{} // nil: confirmed from the start
	cond        chan struct{} // closed and replaced at each report
	gates       map[types.UID]chan struct{}
	gated       bool

	history map[types.UID][]v1.PodStatus
	gone    map[types.UID]bool
	events  map[string]*v1.Event
	order   []string
	stages  []agent.StageTime
	node    *v1.Node
}

var (
	_ agent.Objects  = (*Cluster)(nil)
	_ agent.Reporter = (*Cluster)(nil)
)

// NewCluster returns an empty cluster that is already synced.
func NewCluster() *Cluster {
	c := &Cluster{About: agent.Cluster{Name: "fake", Domain: "cluster.local", ServiceCIDR: "10.96.0.0/12", ClusterCIDR: "10.88.0.0/16"},
		objects: map[string]any{}, watchers: map[chan map[string]struct{}]map[string]struct{}{}, followers: map[chan agent.ObjectChanges]func(agent.ObjectKey) bool{}, synced: make(chan struct{}), cond: make(chan struct{}),
		gates: map[types.UID]chan struct{}{}, history: map[types.UID][]v1.PodStatus{}, gone: map[types.UID]bool{}, events: map[string]*v1.Event{}}
	close(c.synced)
	return c
}

// Put stores objects: pods, Services, ConfigMaps and so on. It panics for an unknown type.
func (c *Cluster) Put(objs ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range objs {
		c.objects[objectKey(o)] = o
		c.notifyChange(objectKey(o))
	}
}

// Delete removes objects from the cluster by kind, namespace and name.
func (c *Cluster) Delete(objs ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range objs {
		delete(c.objects, objectKey(o))
		c.notifyChange(objectKey(o))
	}
}

func objectKey(o any) string {
	switch o := o.(type) {
	case *v1.Pod:
		return "Pod/" + o.Namespace + "/" + o.Name + "/" + string(o.UID)
	case *v1.ConfigMap:
		return "ConfigMap/" + o.Namespace + "/" + o.Name
	case *v1.Secret:
		return "Secret/" + o.Namespace + "/" + o.Name
	case *v1.PersistentVolumeClaim:
		return "PersistentVolumeClaim/" + o.Namespace + "/" + o.Name
	case *v1.PersistentVolume:
		return "PersistentVolume//" + o.Name
	case *storagev1.CSIDriver:
		return "CSIDriver//" + o.Name
	case *storagev1.VolumeAttachment:
		return "VolumeAttachment//" + o.Name
	case *nodev1.RuntimeClass:
		return "RuntimeClass//" + o.Name
	case *resourcev1.ResourceClaim:
		return "ResourceClaim/" + o.Namespace + "/" + o.Name
	case *v1.Service:
		return "Service/" + o.Namespace + "/" + o.Name
	case *discoveryv1.EndpointSlice:
		return "EndpointSlice/" + o.Namespace + "/" + o.Name
	case *v1.Node:
		return "Node//" + o.Name
	case *networkingv1.NetworkPolicy:
		return "NetworkPolicy/" + o.Namespace + "/" + o.Name
	case *v1.Endpoints: // address groups are sent as Endpoints
		return "AddressGroup//" + o.Name
	case *agent.Peer:
		return "Peer//" + o.Name
	}
	panic(fmt.Sprintf("fake cluster does not hold %T", o))
}

func (c *Cluster) notifyChange(key string) {
	c.revision++
	part := strings.SplitN(key, "/", 4)
	kind := part[0]
	for ch, wants := range c.followers {
		news := agent.ObjectChanges{Revision: c.revision}
		if k := (agent.ObjectKey{Kind: kind, Namespace: part[1], Name: part[2]}); wants(k) {
			news.AddKey(k)
		}
		select {
		case old := <-ch:
			old.Merge(news)
			news = old
		default:
		}
		ch <- news
	}
	for ch, pending := range c.watchers {
		pending[kind] = struct{}{}
		select {
		case ch <- maps.Clone(pending):
			clear(pending)
		default:
			select {
			case old := <-ch:
				maps.Copy(pending, old)
			default:
			}
			ch <- maps.Clone(pending)
			clear(pending)
		}
	}
}

func lookUp[T any](c *Cluster, k string) (T, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	o, ok := c.objects[k].(T)
	return o, ok
}

func listObjects[T any](c *Cluster) []T {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []T
	for _, k := range slices.Sorted(maps.Keys(c.objects)) {
		if o, ok := c.objects[k].(T); ok {
			out = append(out, o)
		}
	}
	return out
}

// Pod returns the stored pod with this UID, or false. It implements agent.Objects.
func (c *Cluster) Pod(uid types.UID) (*v1.Pod, bool) {
	for _, p := range c.Pods() {
		if p.UID == uid {
			return p, true
		}
	}
	return nil, false
}

// Pods returns all stored pods. It implements agent.Objects.
func (c *Cluster) Pods() []*v1.Pod { return listObjects[*v1.Pod](c) }

// ConfigMap returns a stored ConfigMap, or false. It implements agent.Objects.
func (c *Cluster) ConfigMap(ns, name string) (*v1.ConfigMap, bool) {
	return lookUp[*v1.ConfigMap](c, "ConfigMap/"+ns+"/"+name)
}

// Secret returns a stored Secret, or false. It implements agent.Objects.
func (c *Cluster) Secret(ns, name string) (*v1.Secret, bool) {
	return lookUp[*v1.Secret](c, "Secret/"+ns+"/"+name)
}

// Claim returns a stored PersistentVolumeClaim, or false. It implements agent.Objects.
func (c *Cluster) Claim(ns, name string) (*v1.PersistentVolumeClaim, bool) {
	return lookUp[*v1.PersistentVolumeClaim](c, "PersistentVolumeClaim/"+ns+"/"+name)
}

// PersistentVolume returns a stored PersistentVolume, or false. It implements agent.Objects.
func (c *Cluster) PersistentVolume(name string) (*v1.PersistentVolume, bool) {
	return lookUp[*v1.PersistentVolume](c, "PersistentVolume//"+name)
}

// CSIDriver returns a stored CSIDriver, or false. It implements agent.Objects.
func (c *Cluster) CSIDriver(name string) (*storagev1.CSIDriver, bool) {
	return lookUp[*storagev1.CSIDriver](c, "CSIDriver//"+name)
}

// VolumeAttachment returns the stored VolumeAttachment of the driver's volume to the stored Node,
// or false. It implements agent.Objects.
func (c *Cluster) VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool) {
	node := ""
	if n, ok := c.Node(); ok {
		node = n.Name
	}
	return agent.FindAttachment(listObjects[*storagev1.VolumeAttachment](c), node, driver, handle)
}

// RuntimeClass returns a stored RuntimeClass, or false. It implements agent.Objects.
func (c *Cluster) RuntimeClass(name string) (*nodev1.RuntimeClass, bool) {
	return lookUp[*nodev1.RuntimeClass](c, "RuntimeClass//"+name)
}

// ResourceClaim returns a stored ResourceClaim, or false. It implements agent.Objects.
func (c *Cluster) ResourceClaim(ns, name string) (*resourcev1.ResourceClaim, bool) {
	return lookUp[*resourcev1.ResourceClaim](c, "ResourceClaim/"+ns+"/"+name)
}

// Services returns all stored Services. It implements agent.Objects.
func (c *Cluster) Services() []*v1.Service { return listObjects[*v1.Service](c) }

// Service returns a stored Service, or false. It implements agent.Objects.
func (c *Cluster) Service(ns, name string) (*v1.Service, bool) {
	return lookUp[*v1.Service](c, "Service/"+ns+"/"+name)
}

// EndpointSlices returns all stored EndpointSlices. It implements agent.Objects.
func (c *Cluster) EndpointSlices() []*discoveryv1.EndpointSlice {
	return listObjects[*discoveryv1.EndpointSlice](c)
}

// EndpointSlice returns a stored EndpointSlice, or false. It implements agent.Objects.
func (c *Cluster) EndpointSlice(ns, name string) (*discoveryv1.EndpointSlice, bool) {
	return lookUp[*discoveryv1.EndpointSlice](c, "EndpointSlice/"+ns+"/"+name)
}

// NetworkPolicies returns all stored NetworkPolicies. It implements agent.Objects.
func (c *Cluster) NetworkPolicies() []*networkingv1.NetworkPolicy {
	return listObjects[*networkingv1.NetworkPolicy](c)
}

// AddressGroup returns a stored address group, or false. It implements agent.Objects.
func (c *Cluster) AddressGroup(name string) (*v1.Endpoints, bool) {
	return lookUp[*v1.Endpoints](c, "AddressGroup//"+name)
}

// Node returns the stored Node, which is the agent's node, or false. It implements agent.Objects.
func (c *Cluster) Node() (*v1.Node, bool) {
	for _, n := range listObjects[*v1.Node](c) {
		return n, true
	}
	return nil, false
}

// Peers returns all stored peers. It implements agent.Objects.
func (c *Cluster) Peers() []*agent.Peer { return listObjects[*agent.Peer](c) }

// Token returns a fake token that names pod and audience. It implements agent.Objects.
func (c *Cluster) Token(_ context.Context, pod *v1.Pod, audience string, seconds int64) (string, time.Time, error) {
	return fmt.Sprintf("token:%s/%s:%s", pod.Namespace, pod.Name, audience), c.Clock.nowOrReal().Add(time.Duration(seconds) * time.Second), nil
}

// Revision returns the number of changes of the stored objects. It implements agent.Objects.
func (c *Cluster) Revision() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.revision
}

// Synced returns a closed channel. It implements agent.Objects.
func (c *Cluster) Synced() <-chan struct{} { return c.synced }

// Confirmed returns a channel that is closed when the objects count as confirmed by a control
// plane. They do from the start, unless Unconfirmed was called. It implements agent.Objects.
func (c *Cluster) Confirmed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unconfirmed != nil {
		return c.unconfirmed
	}
	return c.synced
}

// Unconfirmed makes the objects count as those of a checkpoint until confirm is called.
func (c *Cluster) Unconfirmed() (confirm func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := make(chan struct{})
	c.unconfirmed = ch
	return func() { close(ch) }
}

// Cluster returns the field About. It implements agent.Objects.
func (c *Cluster) Cluster() agent.Cluster { return c.About }

// Follow returns a channel that delivers the changed objects of the kinds until ctx ends. In the
// first value, All is set. It implements agent.Objects.
func (c *Cluster) Follow(ctx context.Context, kinds ...string) <-chan agent.ObjectChanges {
	ch := make(chan agent.ObjectChanges, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	ch <- agent.ObjectChanges{Revision: c.revision, All: true}
	c.followers[ch] = func(k agent.ObjectKey) bool { return slices.Contains(kinds, k.Kind) }
	context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.followers, ch)
		close(ch)
	})
	return ch
}

// Changes returns a channel that delivers the kinds of changed objects until ctx ends. The first
// value names every kind. It implements agent.Objects.
func (c *Cluster) Changes(ctx context.Context) <-chan map[string]struct{} {
	ch := make(chan map[string]struct{}, 1)
	all := map[string]struct{}{}
	for _, k := range []string{"Pod", "Service", "EndpointSlice", "Node", "Peer", "ConfigMap", "Secret", "PersistentVolumeClaim", "PersistentVolume", "CSIDriver", "VolumeAttachment", "RuntimeClass", "NetworkPolicy", "AddressGroup"} {
		all[k] = struct{}{}
	}
	ch <- all
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watchers[ch] = map[string]struct{}{}
	context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.watchers, ch)
		close(ch)
	})
	return ch
}
