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

// objectStore stores the objects of a Cluster, and notifies followers of their changes. It
// implements agent.Objects. It is safe for concurrent use.
type objectStore struct {
	clock *Clock         // of the Cluster
	about *agent.Cluster // of the Cluster

	mu          sync.Mutex
	objects     map[string]any // "Kind/namespace/name"
	revision    uint64
	watchers    map[chan map[string]struct{}]map[string]struct{}
	followers   map[chan agent.ObjectChanges]func(agent.ObjectKey) bool
	synced      chan struct{}
	unconfirmed chan struct{} // nil: confirmed from the start
}

var _ agent.Objects = (*objectStore)(nil)

func newObjectStore(clock *Clock, about *agent.Cluster) *objectStore {
	s := &objectStore{clock: clock, about: about, objects: map[string]any{},
		watchers:  map[chan map[string]struct{}]map[string]struct{}{},
		followers: map[chan agent.ObjectChanges]func(agent.ObjectKey) bool{}, synced: make(chan struct{})}
	close(s.synced)
	return s
}

// setPodStatus copies the status of pod to the stored pod with the same name and UID. It does
// nothing if no such pod is stored.
func (s *objectStore) setPodStatus(pod *v1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if held, ok := s.objects[objectKey(pod)].(*v1.Pod); ok {
		next := held.DeepCopy()
		next.Status = *pod.Status.DeepCopy()
		s.objects[objectKey(pod)] = next
		s.notifyChange("Pod")
	}
}

// deletePod deletes the stored pod with this name and UID, if it exists.
func (s *objectStore) deletePod(namespace, name string, uid types.UID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := "Pod/" + namespace + "/" + name + "/" + string(uid)
	if _, ok := s.objects[k]; ok {
		delete(s.objects, k)
		s.notifyChange("Pod")
	}
}

// putObjects stores objects. It implements Cluster.Put.
func (s *objectStore) putObjects(objs ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range objs {
		s.objects[objectKey(o)] = o
		s.notifyChange(objectKey(o))
	}
}

// deleteObjects removes objects. It implements Cluster.Delete.
func (s *objectStore) deleteObjects(objs ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range objs {
		delete(s.objects, objectKey(o))
		s.notifyChange(objectKey(o))
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

func (s *objectStore) notifyChange(key string) {
	s.revision++
	part := strings.SplitN(key, "/", 4)
	kind := part[0]
	for ch, wants := range s.followers {
		news := agent.ObjectChanges{Revision: s.revision}
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
	for ch, pending := range s.watchers {
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

func lookUp[T any](s *objectStore, k string) (T, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[k].(T)
	return o, ok
}

func listObjects[T any](s *objectStore) []T {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []T
	for _, k := range slices.Sorted(maps.Keys(s.objects)) {
		if o, ok := s.objects[k].(T); ok {
			out = append(out, o)
		}
	}
	return out
}

// Pod returns the stored pod with this UID, or false. It implements agent.Objects.
func (s *objectStore) Pod(uid types.UID) (*v1.Pod, bool) {
	for _, p := range s.Pods() {
		if p.UID == uid {
			return p, true
		}
	}
	return nil, false
}

// Pods returns all stored pods. It implements agent.Objects.
func (s *objectStore) Pods() []*v1.Pod { return listObjects[*v1.Pod](s) }

// ConfigMap returns a stored ConfigMap, or false. It implements agent.Objects.
func (s *objectStore) ConfigMap(ns, name string) (*v1.ConfigMap, bool) {
	return lookUp[*v1.ConfigMap](s, "ConfigMap/"+ns+"/"+name)
}

// Secret returns a stored Secret, or false. It implements agent.Objects.
func (s *objectStore) Secret(ns, name string) (*v1.Secret, bool) {
	return lookUp[*v1.Secret](s, "Secret/"+ns+"/"+name)
}

// Claim returns a stored PersistentVolumeClaim, or false. It implements agent.Objects.
func (s *objectStore) Claim(ns, name string) (*v1.PersistentVolumeClaim, bool) {
	return lookUp[*v1.PersistentVolumeClaim](s, "PersistentVolumeClaim/"+ns+"/"+name)
}

// PersistentVolume returns a stored PersistentVolume, or false. It implements agent.Objects.
func (s *objectStore) PersistentVolume(name string) (*v1.PersistentVolume, bool) {
	return lookUp[*v1.PersistentVolume](s, "PersistentVolume//"+name)
}

// CSIDriver returns a stored CSIDriver, or false. It implements agent.Objects.
func (s *objectStore) CSIDriver(name string) (*storagev1.CSIDriver, bool) {
	return lookUp[*storagev1.CSIDriver](s, "CSIDriver//"+name)
}

// VolumeAttachment returns the stored VolumeAttachment of the driver's volume to the stored Node,
// or false. It implements agent.Objects.
func (s *objectStore) VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool) {
	node := ""
	if n, ok := s.Node(); ok {
		node = n.Name
	}
	return agent.FindAttachment(listObjects[*storagev1.VolumeAttachment](s), node, driver, handle)
}

// RuntimeClass returns a stored RuntimeClass, or false. It implements agent.Objects.
func (s *objectStore) RuntimeClass(name string) (*nodev1.RuntimeClass, bool) {
	return lookUp[*nodev1.RuntimeClass](s, "RuntimeClass//"+name)
}

// ResourceClaim returns a stored ResourceClaim, or false. It implements agent.Objects.
func (s *objectStore) ResourceClaim(ns, name string) (*resourcev1.ResourceClaim, bool) {
	return lookUp[*resourcev1.ResourceClaim](s, "ResourceClaim/"+ns+"/"+name)
}

// Services returns all stored Services. It implements agent.Objects.
func (s *objectStore) Services() []*v1.Service { return listObjects[*v1.Service](s) }

// Service returns a stored Service, or false. It implements agent.Objects.
func (s *objectStore) Service(ns, name string) (*v1.Service, bool) {
	return lookUp[*v1.Service](s, "Service/"+ns+"/"+name)
}

// EndpointSlices returns all stored EndpointSlices. It implements agent.Objects.
func (s *objectStore) EndpointSlices() []*discoveryv1.EndpointSlice {
	return listObjects[*discoveryv1.EndpointSlice](s)
}

// EndpointSlice returns a stored EndpointSlice, or false. It implements agent.Objects.
func (s *objectStore) EndpointSlice(ns, name string) (*discoveryv1.EndpointSlice, bool) {
	return lookUp[*discoveryv1.EndpointSlice](s, "EndpointSlice/"+ns+"/"+name)
}

// NetworkPolicies returns all stored NetworkPolicies. It implements agent.Objects.
func (s *objectStore) NetworkPolicies() []*networkingv1.NetworkPolicy {
	return listObjects[*networkingv1.NetworkPolicy](s)
}

// AddressGroup returns a stored address group, or false. It implements agent.Objects.
func (s *objectStore) AddressGroup(name string) (*v1.Endpoints, bool) {
	return lookUp[*v1.Endpoints](s, "AddressGroup//"+name)
}

// Node returns the stored Node, which is the agent's node, or false. It implements agent.Objects.
func (s *objectStore) Node() (*v1.Node, bool) {
	for _, n := range listObjects[*v1.Node](s) {
		return n, true
	}
	return nil, false
}

// Peers returns all stored peers. It implements agent.Objects.
func (s *objectStore) Peers() []*agent.Peer { return listObjects[*agent.Peer](s) }

// Token returns a fake token that names pod and audience. It implements agent.Objects.
func (s *objectStore) Token(_ context.Context, pod *v1.Pod, audience string, seconds int64) (string, time.Time, error) {
	return fmt.Sprintf("token:%s/%s:%s", pod.Namespace, pod.Name, audience),
		s.clock.nowOrReal().Add(time.Duration(seconds) * time.Second), nil
}

// Revision returns the number of changes of the stored objects. It implements agent.Objects.
func (s *objectStore) Revision() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.revision
}

// Synced returns a closed channel. It implements agent.Objects.
func (s *objectStore) Synced() <-chan struct{} { return s.synced }

// Confirmed returns a channel that is closed when the objects count as confirmed by a control
// plane. They do from the start, unless Cluster.Unconfirmed was called. It implements
// agent.Objects.
func (s *objectStore) Confirmed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.unconfirmed != nil {
		return s.unconfirmed
	}
	return s.synced
}

// setUnconfirmed makes the objects count as not confirmed by a control plane until confirm is
// called. It implements Cluster.Unconfirmed.
func (s *objectStore) setUnconfirmed() (confirm func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ch := make(chan struct{})
	s.unconfirmed = ch
	return func() { close(ch) }
}

// Cluster returns the field About of the Cluster. It implements agent.Objects.
func (s *objectStore) Cluster() agent.Cluster { return *s.about }

// Follow returns a channel that delivers the changed objects of the kinds until ctx ends. In the
// first value, All is set. It implements agent.Objects.
func (s *objectStore) Follow(ctx context.Context, kinds ...string) <-chan agent.ObjectChanges {
	ch := make(chan agent.ObjectChanges, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	ch <- agent.ObjectChanges{Revision: s.revision, All: true}
	s.followers[ch] = func(k agent.ObjectKey) bool { return slices.Contains(kinds, k.Kind) }
	context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.followers, ch)
		close(ch)
	})
	return ch
}

// Changes returns a channel that delivers the kinds of changed objects until ctx ends. The first
// value names every kind. It implements agent.Objects.
func (s *objectStore) Changes(ctx context.Context) <-chan map[string]struct{} {
	ch := make(chan map[string]struct{}, 1)
	all := map[string]struct{}{}
	for _, k := range []string{"Pod", "Service", "EndpointSlice", "Node", "Peer", "ConfigMap", "Secret",
		"PersistentVolumeClaim", "PersistentVolume", "CSIDriver", "VolumeAttachment", "RuntimeClass", "NetworkPolicy",
		"AddressGroup"} {
		all[k] = struct{}{}
	}
	ch <- all
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[ch] = map[string]struct{}{}
	context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, ch)
		close(ch)
	})
	return ch
}
