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

	"keelson.dev/keelson/controlplane/controllers"
)

// maxNames is the maximum number of names that are tried for a claim. The names are derived from
// the pod's UID, so a collision is very unlikely unless it is intended.
const maxNames = 8

// maxBase leaves five characters for the suffix of a claim's name.
const maxBase = 63 - 5

// Missing is a claim of a pod that must be created.
type Missing struct {
	Entry string // name of the entry in spec.resourceClaims
	Claim *resourcev1.ResourceClaim
}

// Trouble is a claim of a pod that cannot be created.
type Trouble struct{ Entry, Why string }

// PodPlan lists the next writes for a pod.
type PodPlan struct {
	Missing  []Missing
	Troubles []Trouble
	// Statuses is the new status.resourceClaimStatuses. It is nil if it is current or not complete
	// yet.
	Statuses []corev1.PodResourceClaimStatus
	// Reserve are allocated claims that must be reserved for the pod. The scheduler does not do
	// this for a pod that was created with a node.
	Reserve []*resourcev1.ResourceClaim
}

// Cluster looks up claims and templates in one namespace.
type Cluster struct {
	Claim    func(name string) (*resourcev1.ResourceClaim, bool)
	Template func(name string) (*resourcev1.ResourceClaimTemplate, bool)
}

// PlanPod computes the next writes for a pod.
func PlanPod(p *corev1.Pod, c Cluster) PodPlan {
	var plan PodPlan
	if p.DeletionTimestamp != nil || controllers.IsPodTerminal(p) {
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
			plan.Troubles = append(plan.Troubles, Trouble{entry.Name, trouble})
		case made != nil:
			plan.Missing = append(plan.Missing, Missing{entry.Name, made})
		default:
			statuses = append(statuses, corev1.PodResourceClaimStatus{Name: entry.Name, ResourceClaimName: &name})
		}
	}
	if len(plan.Missing)+len(plan.Troubles) > 0 {
		return plan // the status is written once, with all claims
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

// claimOf returns the name of the claim for an entry with a template, or the claim to create, or
// the reason why it cannot be created.
func (c Cluster) claimOf(p *corev1.Pod, entry *corev1.PodResourceClaim) (name string, made *resourcev1.ResourceClaim, trouble string) {
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
	return "", nil, "the names that a claim of this pod could have are all taken by others: delete those claims"
}

// claimName returns the name of a pod's claim. The name is deterministic, so that no claim is
// created twice.
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
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(p, corev1.SchemeGroupVersion.WithKind("Pod"))},
		},
		Spec: *t.Spec.Spec.DeepCopy(),
	}
	controllers.CopyTrace(c, p)
	return c
}

// unreservedClaims returns the claims of a pod that are allocated but not reserved for it.
func (c Cluster) unreservedClaims(p *corev1.Pod) []*resourcev1.ResourceClaim {
	var out []*resourcev1.ResourceClaim
	for name, own := range resourceclaim.PodClaims(p) {
		claim, ok := c.Claim(name)
		if !ok || own && resourceclaim.IsForPod(p, claim, false) != nil || slices.Contains(out, claim) {
			continue
		}
		if claim.Status.Allocation != nil && claim.DeletionTimestamp == nil && !resourceclaim.IsReservedForPod(p, claim, false) &&
			len(claim.Status.ReservedFor) < resourcev1.ResourceClaimReservedForMaxSize {
			out = append(out, claim)
		}
	}
	return out
}

// User is the state of a pod to which a claim refers.
type User int

// UserGone means that no pod of the name and UID exists. UserDone means that the pod no longer
// needs the claim, and UserThere that it may need it.
const (
	UserGone User = iota
	UserDone
	UserThere
)

// JudgeUser returns whether a pod needs its claims. p is nil if no pod of the name exists.
func JudgeUser(p *corev1.Pod, uid string) User {
	switch {
	case p == nil || string(p.UID) != uid:
		return UserGone
	case controllers.IsPodTerminal(p), p.DeletionTimestamp != nil && p.Spec.NodeName == "":
		return UserDone
	}
	return UserThere
}

// Step is the next step for a claim.
type Step int

// The steps. The claim is planned again after each step.
const (
	Nothing    Step = iota
	WriteState      // write the status of Next
	Unprotect       // write Next, which lacks the finalizer
	Remove          // delete the claim: its pod will not run
)

// ClaimPlan is the next write for a claim.
type ClaimPlan struct {
	Step Step
	Next *resourcev1.ResourceClaim
}

// PlanClaim computes the next step for a claim. It removes reservations of pods that have ended,
// then deallocates unused devices, and deletes a claim that was created for a pod that will not
// run. user returns the state of a pod in the claim's namespace.
func PlanClaim(c *resourcev1.ResourceClaim, user func(name, uid string) User) ClaimPlan {
	var valid []resourcev1.ResourceClaimConsumerReference
	for _, r := range c.Status.ReservedFor {
		// Reservations of other objects are removed by other controllers.
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

// owningPod returns the name and UID of the pod for which a claim was created.
func owningPod(c *resourcev1.ResourceClaim) (name, uid string) {
	if ref := metav1.GetControllerOfNoCopy(c); ref != nil && ref.Kind == "Pod" && ref.APIVersion == "v1" {
		return ref.Name, string(ref.UID)
	}
	return "", ""
}
