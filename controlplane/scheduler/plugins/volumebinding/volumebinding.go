// Package volumebinding is the plugin VolumeBinding. It restricts a pod to nodes that can use its
// volumes. For PersistentVolumeClaims with the binding mode WaitForFirstConsumer, it binds an
// existing volume that the chosen node can use, or requests provisioning for that node (annotation
// volume.kubernetes.io/selected-node).
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

// noProvisioner is the provisioner of StorageClasses without dynamic provisioning: their volumes
// are created manually.
const noProvisioner = "kubernetes.io/no-provisioner"

var (
	wrongNode = framework.RefuseForGood(Name, "node(s) didn't match PersistentVolume's node affinity")
	noVolume  = framework.RefuseForGood(Name, "node(s) didn't find available persistent volumes to bind")
	unbound   = framework.RefuseForGood(Name, "pod has unbound immediate PersistentVolumeClaims")
	full      = framework.RefuseForGood(Name, "node(s) did not have enough free storage")
	elsewhere = framework.RefuseForGood(Name, "node(s) didn't reach what the claim's volume is to be made of")
	topology  = framework.RefuseForGood(Name, "node(s) didn't match the allowed topologies of the StorageClass")
)

// Plugin restricts a pod to nodes that can use its volumes, and binds its unbound
// PersistentVolumeClaims.
type Plugin struct {
	h        *framework.Handle
	patience time.Duration
	*Promises
}

// Promises records the PersistentVolumes that were chosen for pods that are not bound yet, so that
// no other pod gets them. All profiles of a scheduler share one Promises.
type Promises struct {
	mu       sync.Mutex
	promised map[string]types.UID
}

// NewPromises returns a Promises without chosen PersistentVolumes.
func NewPromises() *Promises { return &Promises{promised: make(map[string]types.UID)} }

// New returns the plugin. promises records the chosen PersistentVolumes and is shared by all
// profiles. patience bounds the time that PreBind waits until volumes are provisioned and bound.
func New(h *framework.Handle, promises *Promises, patience time.Duration) *Plugin {
	return &Plugin{h: h, patience: patience, Promises: promises}
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (*Plugin) Name() string { return Name }

// state is the data of VolumeBinding for one scheduling attempt. PreFilter stores it in the Cycle.
type state struct {
	bound     []*v1.PersistentVolume
	waiting   []waitingClaim
	chosen    map[string]*v1.PersistentVolume // PersistentVolume that Reserve chose, by claim name
	made      []*v1.PersistentVolumeClaim     // claims for which PreBind requests provisioning on the node
	requested map[string]bool                 // claims that allBound has found with selected-node set
	node      *v1.Node                        // node that was passed to Reserve
}

type waitingClaim struct {
	claim *v1.PersistentVolumeClaim
	class *storagev1.StorageClass
}

// PreFilter implements framework.PreFilter: it looks up the pod's PersistentVolumeClaims and
// refuses the pod if one of them does not exist or cannot be used on any node.
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

// addClaim adds a PersistentVolumeClaim of the pod to st, the data of the scheduling attempt. It
// returns a refusal of the pod if no node can fit because of the claim, and otherwise nil.
func (p *Plugin) addClaim(pod *v1.Pod, name string, st *state) *framework.Status {
	claim, ok := p.h.Volumes.Claim(pod.Namespace, name)
	switch {
	case !ok && framework.OwnsClaim(pod, name):
		return framework.RefuseForGood(Name, framework.PendingClaimReason(name))
	case !ok:
		return framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q not found", name))
	case framework.OwnsClaim(pod, name) && ephemeral.VolumeIsForPod(pod, claim) != nil:
		// a claim with the name of the pod's ephemeral volume claim has another owner
		return framework.RefuseForGood(Name, ephemeral.VolumeIsForPod(pod, claim).Error())
	case claim.DeletionTimestamp != nil:
		return framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q is being deleted", name))
	case claim.Status.Phase == v1.ClaimLost:
		return framework.RefuseForGood(Name,
			fmt.Sprintf("persistentvolumeclaim %q bound to non-existent persistentvolume %q", name,
				claim.Spec.VolumeName))
	}
	if isBound(claim) {
		pv, ok := p.h.Volumes.PersistentVolume(claim.Spec.VolumeName)
		if !ok {
			return framework.RefuseForGood(Name,
				"node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)")
		}
		st.bound = append(st.bound, pv)
		return nil
	}
	className := volume.GetPersistentVolumeClaimClass(claim)
	class, ok := p.h.Volumes.StorageClass(className)
	if !ok || class.VolumeBindingMode == nil ||
		*class.VolumeBindingMode != storagev1.VolumeBindingWaitForFirstConsumer {
		return unbound
	}
	if claim.Spec.VolumeName != "" {
		// the volume was set by a user; the persistent volume controller must complete the binding
		// first
		return unbound
	}
	st.waiting = append(st.waiting, waitingClaim{claim, class})
	return nil
}

func isBound(c *v1.PersistentVolumeClaim) bool {
	return c.Spec.VolumeName != "" && (c.Status.Phase == v1.ClaimBound || c.Annotations[volume.AnnBindCompleted] != "")
}

// Filter implements framework.Filter: it refuses a node that cannot use the volumes of the pod's
// bound claims. It also refuses a node for which an unbound claim can get neither an existing
// volume nor a provisioned one.
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

// chooseVolumes decides how each unbound claim of the pod gets a volume that the node can use.
// found contains the existing volumes that it chose, by claim name. made contains the claims for
// which a volume must be provisioned. If neither is possible for a claim, it returns a refusal of
// the node.
func (p *Plugin) chooseVolumes(pod types.UID, claims []waitingClaim, node *v1.Node) (
	found map[string]*v1.PersistentVolume, made []*v1.PersistentVolumeClaim, s *framework.Status,
) {
	taken, wanted := p.promisedToOthers(pod), make(map[string]int64)
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
			if w.claim.Annotations[volume.AnnSelectedNode] != node.Name { // otherwise already requested
				if s := p.checkCapacity(w, wanted, node); s != nil {
					return nil, nil, s
				}
			}
			made = append(made, w.claim)
		}
	}
	return found, made, nil
}

// checkCapacity returns nil if the CSI driver's CSIStorageCapacity objects report enough capacity
// on the node to provision a volume for the claim w, and otherwise a refusal of the node. A driver
// that publishes no capacity always has enough. wanted is the total size of the pod's volumes to
// provision, by StorageClass; checkCapacity adds the size of this claim.
func (p *Plugin) checkCapacity(w waitingClaim, wanted map[string]int64, node *v1.Node) *framework.Status {
	if p.h.Volumes.PublishesCapacity == nil || !p.h.Volumes.PublishesCapacity(w.class.Provisioner) {
		return nil
	}
	size := w.claim.Spec.Resources.Requests[v1.ResourceStorage]
	wanted[w.class.Name] = saturate.Add(wanted[w.class.Name], saturate.Value(&size))
	refused := full
	for _, c := range p.h.Volumes.StorageCapacities(w.class.Name) {
		why := c.Annotations[api.NoRoomAnnotation]
		enough := c.Capacity != nil && saturate.Value(c.Capacity) >= wanted[w.class.Name] &&
			(c.MaximumVolumeSize == nil || c.MaximumVolumeSize.Cmp(size) >= 0)
		if c.NodeTopology == nil || !enough && why == "" {
			continue
		}
		sel, err := metav1.LabelSelectorAsSelector(c.NodeTopology)
		switch {
		case err != nil || !sel.Matches(labels.Set(node.Labels)):
		case why == "":
			return nil
		default:
			refused = framework.RefuseForGood(Name,
				fmt.Sprintf("node(s) can have no volumes of StorageClass %s: %s", w.class.Name, why))
		}
	}
	return refused
}

// promisedToOthers returns a set of the names of the PersistentVolumes that were chosen for other
// pods than the given one. The values of the map are nil.
func (p *Promises) promisedToOthers(pod types.UID) map[string]*v1.PersistentVolume {
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
	for _, pv := range p.h.Volumes.PersistentVolumes() {
		if volume.GetPersistentVolumeClass(pv) == class {
			out = append(out, pv)
		}
	}
	return out
}

// reachedFrom is an annotation that the control plane writes on claims with a snapshot or another
// volume as data source. Its value is the node affinity of the data source, as JSON.
const reachedFrom = "keelson.dev/reached-from"

// canReachSource reports whether a node with the labels have can use the data source of the claim,
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

// isTopologyAllowed reports whether a node with the labels have matches one of the terms, which are
// the allowedTopologies of a StorageClass. If there are no terms, it returns true.
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

// Reserve implements framework.Reserve: it chooses volumes for the pod's unbound claims on the
// node, and records them in Promises, so that no other pod gets them.
func (p *Plugin) Reserve(_ context.Context, c *framework.Cycle, node string) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok || len(st.waiting) == 0 {
		return nil
	}
	n := c.Snapshot.ByName[node]
	if n == nil {
		return framework.Refuse(Name, fmt.Sprintf("node %q no longer exists", node))
	}
	defer p.observeOperation("assume", time.Now())
	found, made, s := p.chooseVolumes(c.Pod.Pod.UID, st.waiting, n.Node)
	if !s.OK() {
		return s
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pv := range found {
		p.promised[pv.Name] = c.Pod.Pod.UID
	}
	st.chosen, st.made, st.requested, st.node = found, made, make(map[string]bool), n.Node
	return nil
}

// Unreserve implements framework.Reserve: it removes the volumes of the pod from Promises, so that
// other pods can get them.
func (p *Plugin) Unreserve(_ context.Context, c *framework.Cycle, _ string) {
	p.releasePod(c.Pod.Pod.UID)
}

// PostBind implements framework.PostBind: it removes the volumes of the pod from Promises, because
// they are bound to its claims.
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

// PreBind implements framework.PreBind: it binds the volumes that Reserve chose to their claims,
// requests provisioning for the other unbound claims, and waits until all claims of the pod are
// bound.
func (p *Plugin) PreBind(ctx context.Context, c *framework.Cycle, node string) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok || len(st.waiting) == 0 {
		return nil
	}
	defer p.observeOperation("bind", time.Now())
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
		return framework.Fail(Name, fmt.Errorf("wait for volumes of pod %s/%s: %w", c.Pod.Pod.Namespace,
			c.Pod.Pod.Name, err))
	}
	return nil
}

// observeOperation records for the metrics that an operation has run since the given time.
func (p *Plugin) observeOperation(operation string, started time.Time) {
	if observe := p.h.Volumes.ObserveOperation; observe != nil {
		observe(operation, time.Since(started))
	}
}

// bindVolume sets claimRef of the PersistentVolume to the claim. The persistent volume controller
// then completes the binding.
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

// requestProvisioning requests that a volume for the claim is provisioned which the node can use:
// it sets the claim's annotation volume.kubernetes.io/selected-node.
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
// longer run on the node: a claim was deleted, is bound to a volume that the node cannot use, or
// cannot be provisioned for the node.
func (p *Plugin) allBound(st *state, node string) (bool, error) {
	for _, w := range st.waiting {
		claim, ok := p.h.Volumes.Claim(w.claim.Namespace, w.claim.Name)
		if !ok || claim.UID != w.claim.UID {
			return false, fmt.Errorf("claim %s was deleted", w.claim.Name)
		}
		if !isBound(claim) {
			_, asked := claim.Annotations[volume.AnnSelectedNode]
			if asked {
				st.requested[claim.Name] = true
			} else if st.requested[claim.Name] {
				return false, fmt.Errorf("the provisioner cannot serve claim %s on node %s", claim.Name, node)
			}
			return false, nil
		}
		pv, ok := p.h.Volumes.PersistentVolume(claim.Spec.VolumeName)
		if !ok {
			return false, nil
		}
		if st.node != nil && volume.CheckNodeAffinity(pv, st.node.Labels) != nil {
			return false, fmt.Errorf("claim %s was bound to volume %s, which node %s cannot reach",
				claim.Name, pv.Name, node)
		}
	}
	return true, nil
}

// MayHelp implements framework.Requeue. It returns true if a node was added or its labels changed,
// if a PersistentVolume or another storage object changed, and if a claim in the pod's namespace
// changed.
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
