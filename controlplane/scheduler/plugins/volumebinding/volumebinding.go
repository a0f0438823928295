// Package volumebinding restricts a pod to nodes that can reach its volumes. It binds claims that
// wait for their first consumer: to an existing volume of the chosen node, or by requesting
// provisioning there (annotation volume.kubernetes.io/selected-node).
package volumebinding

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/storage/ephemeral"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "VolumeBinding"

// DefaultPatience bounds how long a pod waits on its chosen node until its volumes are provisioned
// and bound.
const DefaultPatience = 10 * time.Minute

// noProvisioner is the provisioner of StorageClasses with volumes that are created manually.
const noProvisioner = "kubernetes.io/no-provisioner"

var (
	wrongNode = framework.RefuseForGood(Name, "node(s) didn't match PersistentVolume's node affinity")
	noVolume  = framework.RefuseForGood(Name, "node(s) didn't find available persistent volumes to bind")
	unbound   = framework.RefuseForGood(Name, "pod has unbound immediate PersistentVolumeClaims")
	full      = framework.RefuseForGood(Name, "node(s) did not have enough free storage")
	elsewhere = framework.RefuseForGood(Name, "node(s) didn't reach what the claim's volume is to be made of")
	topology  = framework.RefuseForGood(Name, "node(s) didn't match the allowed topologies of the StorageClass")
)

// Plugin restricts pods to nodes that can use their volumes, and binds their unbound claims.
type Plugin struct {
	h        *framework.Handle
	patience time.Duration
	*Promises
}

// Promises records the PersistentVolumes that were chosen for claims of pods that are not bound
// yet, so that no other pod gets them. All profiles of a scheduler share one Promises.
type Promises struct {
	mu       sync.Mutex
	promised map[string]types.UID
}

// NewPromises returns an empty Promises.
func NewPromises() *Promises { return &Promises{promised: make(map[string]types.UID)} }

// New returns the plugin. patience bounds the wait for provisioning and binding in PreBind.
func New(h *framework.Handle, promises *Promises, patience time.Duration) *Plugin {
	return &Plugin{h: h, patience: patience, Promises: promises}
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (*Plugin) Name() string { return Name }

// state is the plugin's data of one scheduling attempt.
type state struct {
	bound   []*v1.PersistentVolume
	waiting []waitingClaim
	chosen  map[string]*v1.PersistentVolume // chosen volume by claim name, for the reserved node
	made    []*v1.PersistentVolumeClaim     // claims to be provisioned on the reserved node
	asked   map[string]bool                 // names of claims that were observed with the selected-node annotation
	node    *v1.Node                        // the reserved node
}

type waitingClaim struct {
	claim *v1.PersistentVolumeClaim
	class *storagev1.StorageClass
}

// PreFilter implements framework.PreFilter: it looks up the pod's claims and refuses the pod if one
// of them is missing or unusable.
func (p *Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	if len(c.Pod.Claims) == 0 {
		return nil, framework.SkipStatus
	}
	st := &state{}
	for _, name := range c.Pod.Claims {
		if s := p.addClaim(c.Pod.Pod, name, st); s != nil {
			return nil, s
		}
	}
	c.Put(Name, st)
	return nil, nil
}

// addClaim adds a claim of the pod to the state. It returns the reason if the pod must wait because
// of the claim.
func (p *Plugin) addClaim(pod *v1.Pod, name string, st *state) *framework.Status {
	claim, ok := p.h.Claim(pod.Namespace, name)
	switch {
	case !ok && framework.OwnsClaim(pod, name):
		return framework.RefuseForGood(Name, framework.AwaitsClaim(name))
	case !ok:
		return framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q not found", name))
	case framework.OwnsClaim(pod, name) && ephemeral.VolumeIsForPod(pod, claim) != nil: // a claim of another owner with the same name
		return framework.RefuseForGood(Name, ephemeral.VolumeIsForPod(pod, claim).Error())
	case claim.DeletionTimestamp != nil:
		return framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q is being deleted", name))
	case claim.Status.Phase == v1.ClaimLost:
		return framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q bound to non-existent persistentvolume %q", name, claim.Spec.VolumeName))
	}
	if isBound(claim) {
		pv, ok := p.h.PersistentVolume(claim.Spec.VolumeName)
		if !ok {
			return framework.RefuseForGood(Name, "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)")
		}
		st.bound = append(st.bound, pv)
		return nil
	}
	className := volume.GetPersistentVolumeClaimClass(claim)
	class, ok := p.h.StorageClass(className)
	if !ok || class.VolumeBindingMode == nil || *class.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
		return unbound
	}
	if claim.Spec.VolumeName != "" { // a user has set the volume; the volume controller still has to complete the binding
		return unbound
	}
	st.waiting = append(st.waiting, waitingClaim{claim, class})
	return nil
}

func isBound(c *v1.PersistentVolumeClaim) bool {
	return c.Spec.VolumeName != "" && (c.Status.Phase == v1.ClaimBound || c.Annotations[volume.AnnBindCompleted] != "")
}

// Filter implements framework.Filter: it refuses a node that cannot use the pod's bound volumes, or
// on which its other claims can neither be bound nor provisioned.
func (p *Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	for _, pv := range st.bound {
		if volume.CheckNodeAffinity(pv, n.Node.Labels) != nil {
			return wrongNode
		}
	}
	if len(st.waiting) == 0 {
		return nil
	}
	_, _, s := p.chooseVolumes(c.Pod.Pod.UID, st.waiting, n.Node)
	return s
}

// chooseVolumes decides, for each waiting claim of a pod, how it gets a volume on the node. found
// contains, by claim name, the existing volumes that are chosen. made contains the claims for which
// a volume must be provisioned. If neither is possible for a claim, chooseVolumes returns a refusal
// of the node.
func (p *Plugin) chooseVolumes(pod types.UID, claims []waitingClaim, node *v1.Node) (found map[string]*v1.PersistentVolume, made []*v1.PersistentVolumeClaim, s *framework.Status) {
	taken, wanted := p.takenFrom(pod), make(map[string]int64)
	for _, w := range claims {
		if sel := w.claim.Annotations[volume.AnnSelectedNode]; sel != "" && sel != node.Name {
			return nil, nil, wrongNode // a volume is being provisioned for another node already
		}
		pv, err := volume.FindMatchingVolume(w.claim, p.ofClass(w.class.Name), node, taken, true, true)
		if err != nil {
			return nil, nil, framework.Fail(Name, err)
		}
		switch {
		case pv != nil:
			taken[pv.Name] = pv
			if found == nil {
				found = make(map[string]*v1.PersistentVolume)
			}
			found[w.claim.Name] = pv
		case w.class.Provisioner == noProvisioner || w.class.Provisioner == "":
			return nil, nil, noVolume
		case !canReachSource(w.claim, node.Labels):
			return nil, nil, elsewhere
		case !isTopologyAllowed(w.class.AllowedTopologies, node.Labels):
			return nil, nil, topology
		default:
			if w.claim.Annotations[volume.AnnSelectedNode] != node.Name { // otherwise it is being provisioned there
				if s := p.hasRoom(w, wanted, node); s != nil {
					return nil, nil, s
				}
			}
			made = append(made, w.claim)
		}
	}
	return found, made, nil
}

// hasRoom returns nil if the CSI driver has enough capacity on the node to provision a volume for
// the claim, according to its CSIStorageCapacity objects. Otherwise it returns the refusal of the
// node. A driver that publishes no capacity always has enough. wanted is the total size, by
// StorageClass, of the pod's volumes to be provisioned. hasRoom adds the size of this claim.
func (p *Plugin) hasRoom(w waitingClaim, wanted map[string]int64, node *v1.Node) *framework.Status {
	if p.h.KnowsRoom == nil || !p.h.KnowsRoom(w.class.Provisioner) {
		return nil
	}
	size := w.claim.Spec.Resources.Requests[v1.ResourceStorage]
	wanted[w.class.Name] = saturate.Add(wanted[w.class.Name], saturate.Value(&size))
	refused := full
	for _, c := range p.h.RoomFor(w.class.Name) {
		why := c.Annotations[api.NoRoomAnnotation]
		enough := c.Capacity != nil && saturate.Value(c.Capacity) >= wanted[w.class.Name] && (c.MaximumVolumeSize == nil || c.MaximumVolumeSize.Cmp(size) >= 0)
		if c.NodeTopology == nil || !enough && why == "" {
			continue
		}
		sel, err := metav1.LabelSelectorAsSelector(c.NodeTopology)
		switch {
		case err != nil || !sel.Matches(labels.Set(node.Labels)):
		case why == "":
			return nil
		default:
			refused = framework.RefuseForGood(Name, fmt.Sprintf("node(s) can have no volumes of StorageClass %s: %s", w.class.Name, why))
		}
	}
	return refused
}

// takenFrom returns the names of the volumes that are promised to other pods than this one. The
// values of the map are nil.
func (p *Promises) takenFrom(pod types.UID) map[string]*v1.PersistentVolume {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[string]*v1.PersistentVolume, len(p.promised))
	for name, uid := range p.promised {
		if uid != pod {
			out[name] = nil
		}
	}
	return out
}

func (p *Plugin) ofClass(class string) []*v1.PersistentVolume {
	var out []*v1.PersistentVolume
	for _, pv := range p.h.PersistentVolumes() {
		if volume.GetPersistentVolumeClass(pv) == class {
			out = append(out, pv)
		}
	}
	return out
}

// reachedFrom is an annotation that the control plane writes on claims with a snapshot or another
// volume as data source. Its value is the node affinity of the data source, as JSON.
const reachedFrom = "keelson.dev/reached-from"

// canReachSource reports whether a node with the given labels can use the claim's data source,
// according to the annotation reachedFrom. It returns true if the annotation is missing or invalid;
// the provisioner then decides.
func canReachSource(c *v1.PersistentVolumeClaim, have map[string]string) bool {
	text := c.Annotations[reachedFrom]
	if text == "" {
		return true
	}
	pv := &v1.PersistentVolume{}
	if json.Unmarshal([]byte(text), &pv.Spec.NodeAffinity) != nil {
		return true
	}
	return volume.CheckNodeAffinity(pv, have) == nil
}

// isTopologyAllowed reports whether the node labels match one of the allowedTopologies of a
// StorageClass. Without terms all nodes match.
func isTopologyAllowed(terms []v1.TopologySelectorTerm, have map[string]string) bool {
	if len(terms) == 0 {
		return true
	}
	for _, t := range terms {
		sel := labels.Everything()
		for _, e := range t.MatchLabelExpressions {
			req, err := labels.NewRequirement(e.Key, "in", e.Values)
			if err != nil {
				return false
			}
			sel = sel.Add(*req)
		}
		if sel.Matches(labels.Set(have)) {
			return true
		}
	}
	return false
}

// Reserve implements framework.Reserve: it chooses volumes on the node and promises them to this
// pod.
func (p *Plugin) Reserve(_ context.Context, c *framework.Cycle, node string) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok || len(st.waiting) == 0 {
		return nil
	}
	n := c.Snapshot.ByName[node]
	if n == nil {
		return framework.Refuse(Name, fmt.Sprintf("node %q no longer exists", node))
	}
	found, made, s := p.chooseVolumes(c.Pod.Pod.UID, st.waiting, n.Node)
	if !s.OK() {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pv := range found {
		p.promised[pv.Name] = c.Pod.Pod.UID
	}
	st.chosen, st.made, st.asked, st.node = found, made, make(map[string]bool), n.Node
	return nil
}

// Unreserve implements framework.Reserve: it ends the promises to this pod.
func (p *Plugin) Unreserve(_ context.Context, c *framework.Cycle, _ string) {
	p.releasePod(c.Pod.Pod.UID)
}

// PostBind implements framework.PostBind: it ends the promises to this pod, because its claims are
// bound.
func (p *Plugin) PostBind(_ context.Context, c *framework.Cycle, _ string) {
	p.releasePod(c.Pod.Pod.UID)
}

func (p *Promises) releasePod(pod types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for name, uid := range p.promised {
		if uid == pod {
			delete(p.promised, name)
		}
	}
}

// PreBind implements framework.PreBind: it binds the chosen volumes to their claims, requests
// provisioning for the other claims, and waits until every claim is bound.
func (p *Plugin) PreBind(ctx context.Context, c *framework.Cycle, node string) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok || len(st.waiting) == 0 {
		return nil
	}
	for _, w := range st.waiting {
		if pv := st.chosen[w.claim.Name]; pv != nil {
			if err := p.bindVolume(ctx, pv, w.claim); err != nil {
				return framework.Fail(Name, err)
			}
		}
	}
	for _, claim := range st.made {
		if err := p.requestProvisioning(ctx, claim, node); err != nil {
			return framework.Fail(Name, err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, p.patience)
	defer cancel()
	err := p.h.AwaitVolumes(ctx, func() (bool, error) { return p.allBound(st, node) })
	if err != nil {
		return framework.Fail(Name, fmt.Errorf("wait for volumes of pod %s/%s: %w", c.Pod.Pod.Namespace, c.Pod.Pod.Name, err))
	}
	return nil
}

// bindVolume sets the volume's claimRef to the claim. The persistent volume controller completes
// the binding.
func (p *Plugin) bindVolume(ctx context.Context, pv *v1.PersistentVolume, claim *v1.PersistentVolumeClaim) error {
	next, dirty, err := volume.GetBindVolumeToClaim(pv, claim)
	if err != nil {
		return fmt.Errorf("bind volume %s to claim %s/%s: %w", pv.Name, claim.Namespace, claim.Name, err)
	}
	if !dirty {
		return nil
	}
	if _, err := p.h.UpdateVolume(ctx, next); err != nil {
		return fmt.Errorf("bind volume %s to claim %s/%s: %w", pv.Name, claim.Namespace, claim.Name, err)
	}
	return nil
}

// requestProvisioning requests a volume for the claim on the node, with the annotation
// volume.kubernetes.io/selected-node.
func (p *Plugin) requestProvisioning(ctx context.Context, claim *v1.PersistentVolumeClaim, node string) error {
	if claim.Annotations[volume.AnnSelectedNode] == node {
		return nil
	}
	next := claim.DeepCopy()
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, volume.AnnSelectedNode, node)
	if _, err := p.h.UpdateClaim(ctx, next); err != nil {
		return fmt.Errorf("select node %s for claim %s/%s: %w", node, claim.Namespace, claim.Name, err)
	}
	return nil
}

// allBound reports whether all claims of the pod are bound. It returns an error if the pod can no
// longer use the node: a claim was deleted, is bound to a volume that the node cannot use, or
// cannot be provisioned there.
func (p *Plugin) allBound(st *state, node string) (bool, error) {
	for _, w := range st.waiting {
		claim, ok := p.h.Claim(w.claim.Namespace, w.claim.Name)
		if !ok || claim.UID != w.claim.UID {
			return false, fmt.Errorf("claim %s was deleted", w.claim.Name)
		}
		if !isBound(claim) {
			_, asked := claim.Annotations[volume.AnnSelectedNode]
			if asked {
				st.asked[claim.Name] = true
			} else if st.asked[claim.Name] {
				return false, fmt.Errorf("the provisioner cannot serve claim %s on node %s", claim.Name, node)
			}
			return false, nil
		}
		pv, ok := p.h.PersistentVolume(claim.Spec.VolumeName)
		if !ok {
			return false, nil
		}
		if st.node != nil && volume.CheckNodeAffinity(pv, st.node.Labels) != nil {
			return false, fmt.Errorf("claim %s was bound to volume %s, which node %s cannot reach", claim.Name, pv.Name, node)
		}
	}
	return true, nil
}

// MayHelp implements framework.Requeue: a node was added or its labels changed, a volume or storage
// object changed, or a claim in the pod's namespace changed.
func (p *Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	switch e {
	case framework.NodeAdded, framework.NodeLabels, framework.VolumeChanged, framework.StorageClassChange:
		return true
	case framework.ClaimChanged:
		c, ok := obj.(*v1.PersistentVolumeClaim)
		return !ok || c.Namespace == pod.Namespace
	}
	return false
}
