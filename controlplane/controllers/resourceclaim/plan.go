package resourceclaim

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// maxNames is the maximum number of names that are tried for a new ResourceClaim. The names are
// derived from the pod's UID, so a name that is in use is very unlikely unless it is intended.
const maxNames = 8

// maxBase is the maximum length of a ResourceClaim's name without its suffix of five characters.
const maxBase = 63 - 5

// MissingClaim is a ResourceClaim that must be created for an entry in spec.resourceClaims of a
// pod.
type MissingClaim struct {
	Entry string // name of the entry in spec.resourceClaims
	Claim *resourcev1.ResourceClaim
}

// FailedEntry is an entry in spec.resourceClaims of a pod for which no ResourceClaim can be
// created, with the reason.
type FailedEntry struct{ Entry, Why string }

// PodPlan is the result of PlanPod: the ResourceClaims to create and the status to write for a pod.
type PodPlan struct {
	Missing  []MissingClaim
	Troubles []FailedEntry
	// Statuses is the new status.resourceClaimStatuses of the pod. It is nil if the status is
	// current, or if claims must be created first.
	Statuses []corev1.PodResourceClaimStatus
	// Reserve lists allocated claims that must be reserved for the pod. The scheduler reserves
	// claims only for pods that it binds, not for a pod that was created with a node.
	Reserve []*resourcev1.ResourceClaim
}

// Cluster looks up ResourceClaims and ResourceClaimTemplates of one namespace.
type Cluster struct {
	Claim    func(name string) (*resourcev1.ResourceClaim, bool)
	Template func(name string) (*resourcev1.ResourceClaimTemplate, bool)
}

// PlanPod returns the writes that are due for a pod and its ResourceClaims. c returns the objects
// of the pod's namespace.
func PlanPod(p *corev1.Pod, c Cluster) PodPlan {
	var plan PodPlan
	if p.DeletionTimestamp != nil || api.IsPodTerminal(p) {
		return plan
	}
	var statuses []corev1.PodResourceClaimStatus
	for i := range p.Spec.ResourceClaims {
		entry := &p.Spec.ResourceClaims[i]
		if entry.ResourceClaimTemplateName == nil {
			continue
		}
		name, made, trouble := c.claimOf(p, entry)
		switch {
		case trouble != "":
			plan.Troubles = append(plan.Troubles, FailedEntry{entry.Name, trouble})
		case made != nil:
			plan.Missing = append(plan.Missing, MissingClaim{entry.Name, made})
		default:
			statuses = append(statuses, corev1.PodResourceClaimStatus{Name: entry.Name, ResourceClaimName: &name})
		}
	}
	if len(plan.Missing)+len(plan.Troubles) > 0 {
		return plan // the status is written only once, when all claims exist
	}
	if !resourceclaim.PodStatusEqual(statuses, p.Status.ResourceClaimStatuses) {
		plan.Statuses = statuses
		return plan
	}
	if p.Spec.NodeName != "" {
		plan.Reserve = c.unreservedClaims(p)
	}
	return plan
}

// claimOf returns the name of the existing ResourceClaim for an entry that names a template. If no
// claim exists, it returns the claim to create. If no claim can be created, trouble contains the
// reason.
func (c Cluster) claimOf(p *corev1.Pod, entry *corev1.PodResourceClaim) (
	name string, made *resourcev1.ResourceClaim, trouble string,
) {
	for _, s := range p.Status.ResourceClaimStatuses {
		if s.Name != entry.Name || s.ResourceClaimName == nil {
			continue
		}
		if have, ok := c.Claim(*s.ResourceClaimName); ok {
			if err := resourceclaim.IsForPod(p, have, false); err != nil {
				return "", nil, err.Error()
			}
			return have.Name, nil, ""
		}
	}
	for try := range maxNames {
		name := claimName(p, entry.Name, try)
		have, taken := c.Claim(name)
		if taken && resourceclaim.IsForPod(p, have, false) != nil {
			continue
		}
		if taken {
			return name, nil, ""
		}
		t, ok := c.Template(*entry.ResourceClaimTemplateName)
		if !ok {
			return "", nil, fmt.Sprintf("resource claim template %q: not found", *entry.ResourceClaimTemplateName)
		}
		return "", claimFor(p, entry.Name, name, t), ""
	}
	return "", nil, "all names that a claim of this pod can have are in use by other claims: delete these claims"
}

// claimName returns the name of the ResourceClaim for an entry of pod p. try selects one of several
// names. The name is deterministic, so that no claim is created twice.
func claimName(p *corev1.Pod, entry string, try int) string {
	base := p.Name + "-" + entry + "-"
	if len(base) > maxBase {
		base = base[:maxBase-1] + "-"
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%d", p.UID, entry, try))
	return base + rand.SafeEncodeString(fmt.Sprint(binary.BigEndian.Uint32(sum[:])%90000+10000))
}

func claimFor(p *corev1.Pod, entry, name string, t *resourcev1.ResourceClaimTemplate) *resourcev1.ResourceClaim {
	about := maps.Clone(t.Spec.Annotations)
	if about == nil {
		about = map[string]string{}
	}
	about[resourcev1.PodResourceClaimAnnotation] = entry
	c := &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: name, Labels: maps.Clone(t.Spec.Labels), Annotations: about,
			OwnerReferences: []metav1.OwnerReference{
				*metav1.NewControllerRef(p, corev1.SchemeGroupVersion.WithKind("Pod"))},
		},
		Spec: *t.Spec.Spec.DeepCopy(),
	}
	engine.CopyTrace(c, p)
	return c
}

// unreservedClaims returns the ResourceClaims of pod p that are allocated but not reserved for p.
func (c Cluster) unreservedClaims(p *corev1.Pod) []*resourcev1.ResourceClaim {
	var out []*resourcev1.ResourceClaim
	for name, own := range resourceclaim.PodClaims(p) {
		claim, ok := c.Claim(name)
		if !ok || own && resourceclaim.IsForPod(p, claim, false) != nil || slices.Contains(out, claim) {
			continue
		}
		if claim.Status.Allocation != nil && claim.DeletionTimestamp == nil &&
			!resourceclaim.IsReservedForPod(p, claim, false) &&
			len(claim.Status.ReservedFor) < resourcev1.ResourceClaimReservedForMaxSize {
			out = append(out, claim)
		}
	}
	return out
}

// UserState is the state of a pod for which a ResourceClaim is reserved or was created.
type UserState int

// States of a pod for which a claim is reserved or was created. UserGone: no pod with this name and
// UID exists. UserDone: the pod no longer needs the claim. UserThere: the pod may need the claim.
const (
	UserGone UserState = iota
	UserDone
	UserThere
)

// JudgeUser returns the state of the pod with this UID. p is the current pod of its name, or nil.
func JudgeUser(p *corev1.Pod, uid string) UserState {
	switch {
	case p == nil || string(p.UID) != uid:
		return UserGone
	case api.IsPodTerminal(p), p.DeletionTimestamp != nil && p.Spec.NodeName == "":
		return UserDone
	}
	return UserThere
}

// Step is the next write for a ResourceClaim.
type Step int

// Steps for a ResourceClaim. After each step, PlanClaim is called again. Next is the field of
// ClaimPlan.
const (
	Nothing    Step = iota
	WriteState      // write the status of Next
	Unprotect       // update the claim to Next, which lacks the finalizer
	Remove          // delete the claim: the pod for which it was created will not run
)

// ClaimPlan is the result of PlanClaim. Next is the object to write for WriteState and Unprotect.
type ClaimPlan struct {
	Step Step
	Next *resourcev1.ResourceClaim
}

// PlanClaim returns the next write for ResourceClaim c. It first removes reservations of pods that
// have ended. A claim without reservations is deallocated. If c was created for a pod that will not
// run, c is deleted. user returns the state of a pod in the namespace of c.
func PlanClaim(c *resourcev1.ResourceClaim, user func(name, uid string) UserState) ClaimPlan {
	var valid []resourcev1.ResourceClaimConsumerReference
	for _, r := range c.Status.ReservedFor {
		// Reservations for objects other than pods belong to other controllers.
		if r.APIGroup != "" || r.Resource != "pods" || user(r.Name, string(r.UID)) == UserThere {
			valid = append(valid, r)
		}
	}
	ours := slices.Contains(c.Finalizers, resourcev1.Finalizer)
	if len(valid) < len(c.Status.ReservedFor) {
		next := c.DeepCopy()
		if next.Status.ReservedFor = valid; len(valid) == 0 && ours {
			next.Status.Allocation = nil
		}
		return ClaimPlan{WriteState, next}
	}
	if len(valid) > 0 {
		return ClaimPlan{}
	}
	if c.DeletionTimestamp != nil {
		if !ours {
			return ClaimPlan{}
		}
		next := c.DeepCopy()
		if c.Status.Allocation != nil {
			next.Status.Allocation = nil
			return ClaimPlan{WriteState, next}
		}
		next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == resourcev1.Finalizer })
		return ClaimPlan{Unprotect, next}
	}
	if name, uid := owningPod(c); name != "" && user(name, uid) != UserThere {
		return ClaimPlan{Step: Remove}
	}
	return ClaimPlan{}
}

// owningPod returns the name and UID of the pod for which ResourceClaim c was created, or "".
func owningPod(c *resourcev1.ResourceClaim) (name, uid string) {
	if ref := metav1.GetControllerOfNoCopy(c); ref != nil && ref.Kind == "Pod" && ref.APIVersion == "v1" {
		return ref.Name, string(ref.UID)
	}
	return "", ""
}
