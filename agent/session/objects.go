package session

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wakeup"
)

// nodeObjects is the read side of a Session: it returns objects from the view, the node's copy of
// cluster objects, and tokens from the token cache. It implements agent.Objects.
type nodeObjects struct {
	view   *view
	tokens *tokenCache
}

var _ agent.Objects = (*nodeObjects)(nil)

// Changes returns a channel that delivers the kinds of changed objects until ctx ends. Undelivered
// values are merged, and the first value names every kind. It implements agent.Objects.
func (o *nodeObjects) Changes(ctx context.Context) <-chan map[string]struct{} {
	out := make(chan map[string]struct{})
	r := &kindReader{pending: make(map[string]struct{}), wake: wakeup.New()}
	v := o.view
	v.mu.Lock()
	v.changes.readers[r] = struct{}{}
	v.mu.Unlock()
	all := make(map[string]struct{}, len(kindNames))
	for _, k := range kindNames {
		all[k] = struct{}{}
	}
	r.addKinds(all)
	go deliverPending(ctx, r.wake, r.takeKinds, out, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.changes.readers, r)
	})
	return out
}

func viewObject[T wireObject](v *view, kind, namespace, name string) (T, bool) {
	v.mu.RLock()
	defer v.mu.RUnlock()
	h, ok := v.current.getObject(objectKey{kind, namespace, name})
	if !ok {
		var none T
		return none, false
	}
	t, ok := h.object.(T)
	return t, ok
}

func viewObjects[T wireObject](v *view, kind string) []T {
	v.mu.RLock()
	defer v.mu.RUnlock()
	out := make([]T, 0, len(v.current.byKind[kind]))
	for _, h := range v.current.byKind[kind] {
		if t, ok := h.object.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

// Pod returns the pod with this UID, or false if it is not assigned to this node. It implements
// agent.Objects.
func (o *nodeObjects) Pod(uid types.UID) (*v1.Pod, bool) {
	o.view.mu.RLock()
	defer o.view.mu.RUnlock()
	p, ok := o.view.current.pods[uid]
	return p, ok
}

// Pods returns the pods that are assigned to this node. It implements agent.Objects.
func (o *nodeObjects) Pods() []*v1.Pod { return viewObjects[*v1.Pod](o.view, "Pod") }

// ConfigMap returns a ConfigMap from the view, or false if the view does not have it.
func (o *nodeObjects) ConfigMap(namespace, name string) (*v1.ConfigMap, bool) {
	return viewObject[*v1.ConfigMap](o.view, "ConfigMap", namespace, name)
}

// Secret returns a Secret from the view, or false if the view does not have it.
func (o *nodeObjects) Secret(namespace, name string) (*v1.Secret, bool) {
	return viewObject[*v1.Secret](o.view, "Secret", namespace, name)
}

// Claim returns a PersistentVolumeClaim from the view, or false if the view does not have it.
func (o *nodeObjects) Claim(namespace, name string) (*v1.PersistentVolumeClaim, bool) {
	return viewObject[*v1.PersistentVolumeClaim](o.view, "PersistentVolumeClaim", namespace, name)
}

// PersistentVolume returns a PersistentVolume from the view, or false if the view does not have it.
func (o *nodeObjects) PersistentVolume(name string) (*v1.PersistentVolume, bool) {
	return viewObject[*v1.PersistentVolume](o.view, "PersistentVolume", "", name)
}

// RuntimeClass returns a RuntimeClass from the view, or false if the view does not have it.
func (o *nodeObjects) RuntimeClass(name string) (*nodev1.RuntimeClass, bool) {
	return viewObject[*nodev1.RuntimeClass](o.view, "RuntimeClass", "", name)
}

// ResourceClaim returns a ResourceClaim from the view, or false if the view does not have it.
func (o *nodeObjects) ResourceClaim(namespace, name string) (*resourcev1.ResourceClaim, bool) {
	return viewObject[*resourcev1.ResourceClaim](o.view, "ResourceClaim", namespace, name)
}

// CSIDriver returns a CSIDriver from the view, or false if the view does not have it.
func (o *nodeObjects) CSIDriver(name string) (*storagev1.CSIDriver, bool) {
	return viewObject[*storagev1.CSIDriver](o.view, "CSIDriver", "", name)
}

// VolumeAttachment returns the VolumeAttachment to this node of the driver's volume with this
// handle, or false if the view does not have it. It implements agent.Objects.
func (o *nodeObjects) VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool) {
	return agent.FindAttachment(viewObjects[*storagev1.VolumeAttachment](o.view, "VolumeAttachment"), o.view.nodeName,
		driver, handle)
}

// Services returns all Services in the view. It implements agent.Objects.
func (o *nodeObjects) Services() []*v1.Service { return viewObjects[*v1.Service](o.view, "Service") }

// Service returns a Service from the view, or false if the view does not have it.
func (o *nodeObjects) Service(namespace, name string) (*v1.Service, bool) {
	return viewObject[*v1.Service](o.view, "Service", namespace, name)
}

// EndpointSlices returns all EndpointSlices in the view. It implements agent.Objects.
func (o *nodeObjects) EndpointSlices() []*discoveryv1.EndpointSlice {
	return viewObjects[*discoveryv1.EndpointSlice](o.view, "EndpointSlice")
}

// EndpointSlice returns an EndpointSlice from the view, or false if the view does not have it.
func (o *nodeObjects) EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool) {
	return viewObject[*discoveryv1.EndpointSlice](o.view, "EndpointSlice", namespace, name)
}

// NetworkPolicies returns the policies that select a pod of this node. Callers must not modify
// them. It implements agent.Objects.
func (o *nodeObjects) NetworkPolicies() []*networkingv1.NetworkPolicy {
	return viewObjects[*networkingv1.NetworkPolicy](o.view, "NetworkPolicy")
}

// AddressGroup returns the addresses and named ports of the pods that match a peer of a
// NetworkPolicy, or false. It implements agent.Objects.
func (o *nodeObjects) AddressGroup(name string) (*v1.Endpoints, bool) {
	return viewObject[*v1.Endpoints](o.view, kindAddressGroup, "", name)
}

// Node returns this node's own Node object, or false if the control plane has not sent it yet.
func (o *nodeObjects) Node() (*v1.Node, bool) {
	return viewObject[*v1.Node](o.view, "Node", "", o.view.nodeName)
}

// Revision returns the revision up to which the view is complete. It implements agent.Objects.
func (o *nodeObjects) Revision() uint64 {
	o.view.mu.RLock()
	defer o.view.mu.RUnlock()
	return o.view.revision
}

// Synced returns a channel that is closed once a full assignment or a checkpoint has been loaded.
// It implements agent.Objects.
func (o *nodeObjects) Synced() <-chan struct{} { return o.view.synced }

// Confirmed returns a channel that is closed once a control plane has confirmed the view to this
// process. Loading the checkpoint does not close it. It implements agent.Objects.
func (o *nodeObjects) Confirmed() <-chan struct{} { return o.view.confirmed }

// Cluster returns the cluster settings of the session's Welcome message. If this node's Node object
// has pod CIDRs, they replace the pod CIDRs of the message. It implements agent.Objects.
func (o *nodeObjects) Cluster() agent.Cluster {
	own, ok := o.Node()
	o.view.mu.RLock()
	defer o.view.mu.RUnlock()
	c := o.view.cluster
	if ok && own.Spec.PodCIDR != "" {
		c.PodCIDR, c.PodCIDRs = own.Spec.PodCIDR, own.Spec.PodCIDRs
	}
	return c
}

// Peers returns the other nodes of the cluster in the view, in no order. Callers must not modify
// them.
func (o *nodeObjects) Peers() []*agent.Peer {
	o.view.mu.RLock()
	defer o.view.mu.RUnlock()
	out := make([]*agent.Peer, 0, len(o.view.current.peers))
	for _, h := range o.view.current.peers {
		out = append(out, &h.Peer)
	}
	return out
}

// Follow returns a channel that delivers the changed objects of the given kinds until ctx ends, as
// agent.Objects specifies. Undelivered changes are merged. The first value has All set.
func (o *nodeObjects) Follow(ctx context.Context, kinds ...string) <-chan agent.ObjectChanges {
	out := make(chan agent.ObjectChanges)
	f := &follower{kinds: kinds, wake: wakeup.New()}
	v := o.view
	v.mu.Lock()
	v.changes.followers[f] = struct{}{}
	if v.loaded {
		f.addChanges(agent.ObjectChanges{Revision: v.revision, All: true})
	} else {
		f.pending.All = true // delivered with the first batch
	}
	v.mu.Unlock()
	go deliverPending(ctx, f.wake, f.takeChanges, out, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.changes.followers, f)
	})
	return out
}

// Token returns a bound service account token of the pod and its expiry time, from the cache or
// from the control plane. If a renewal fails, it returns the cached token while that token is
// valid. It implements agent.Objects.
func (o *nodeObjects) Token(ctx context.Context, pod *v1.Pod, audience string, expirationSeconds int64) (
	string, time.Time, error,
) {
	k := tokenKey{pod.UID, audience, expirationSeconds}
	t := o.tokens
	for {
		t.mu.Lock()
		have, ok := t.cached[k]
		now := time.Now()
		if ok && now.Before(have.Renew) {
			t.mu.Unlock()
			return have.Token, have.Expires, nil
		}
		wait := t.inFlight[k]
		if wait == nil {
			t.inFlight[k] = make(chan struct{})
		}
		t.mu.Unlock()
		if wait != nil { // another caller is requesting the same token
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return "", time.Time{}, ctx.Err()
			}
		}
		got, err := t.requestToken(ctx, k, pod)
		t.mu.Lock()
		if err == nil {
			t.cached[k] = got
		}
		close(t.inFlight[k])
		delete(t.inFlight, k)
		t.mu.Unlock()
		switch {
		case err == nil:
			t.saveTokens()
			return got.Token, got.Expires, nil
		case ok && time.Now().Before(have.Expires):
			return have.Token, have.Expires, nil
		}
		return "", time.Time{}, fmt.Errorf("token of service account %s/%s for pod %s: %w", pod.Namespace,
			pod.Spec.ServiceAccountName, pod.Name, err)
	}
}
