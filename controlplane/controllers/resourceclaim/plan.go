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

// maxNames is how many names are tried for a claim. They are spelled by the pod's UID: that somebody has one of them is
// chance or intent.
const maxNames = 8

// maxBase leaves room for the five letters that follow it in the name of a claim.
const maxBase = 63 - 5

// Missing is a claim of a pod that is to be made.
type Missing struct {
	Entry string // of spec.resourceClaims
	Claim *resourcev1.ResourceClaim
}

// Trouble is a claim of a pod that cannot be made as things are.
type Trouble struct{ Entry, Why string }

// PodPlan is what a pod lacks.
type PodPlan struct {
	Missing  []Missing
	Troubles []Trouble
	// Statuses is what status.resourceClaimStatuses has to say; nil when it says so already, or cannot yet.
	Statuses []corev1.PodResourceClaimStatus
	// Reserve are claims that have their devices and are to be kept for the pod, which nobody schedules: it was
	// created with a node.
	Reserve []*resourcev1.ResourceClaim
}

// Cluster is what plans look up, in the namespace of what they are for.
type Cluster struct {
	Claim    func(name string) (*resourcev1.ResourceClaim, bool)
	Template func(name string) (*resourcev1.ResourceClaimTemplate, bool)
}

// PlanPod says what a pod lacks.
func PlanPod(p *corev1.Pod, c Cluster) PodPlan {
	var plan PodPlan
	if p.DeletionTimestamp != nil || controllers.PodEnded(p) {
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
		return plan // all are named at once
	}
	if !resourceclaim.PodStatusEqual(statuses, p.Status.ResourceClaimStatuses) {
		plan.Statuses = statuses
		return plan
	}
	if p.Spec.NodeName != "" {
		plan.Reserve = c.unreserved(p)
	}
	return plan
}

// claimOf finds the claim of an entry with a template, or says which one to make, or why that cannot be.
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

// claimName is that of a claim of a pod: the same however often it is asked for, so that no claim is made twice.
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

// unreserved are the claims of a pod that have devices and are not kept for it.
func (c Cluster) unreserved(p *corev1.Pod) []*resourcev1.ResourceClaim {
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

// User is what is known of a pod that a claim names.
type User int

// The pod that has the name and UID may need the claim still; or it will not; or there is none.
const (
	UserGone User = iota
	UserDone
	UserThere
)

// JudgeUser says whether a pod needs its claims. p is nil when there is none of the name.
func JudgeUser(p *corev1.Pod, uid string) User {
	switch {
	case p == nil || string(p.UID) != uid:
		return UserGone
	case controllers.PodEnded(p), p.DeletionTimestamp != nil && p.Spec.NodeName == "":
		return UserDone
	}
	return UserThere
}

// Step is what is to be done next about a claim.
type Step int

// The steps. A claim is looked at again after each.
const (
	Nothing    Step = iota
	WriteState      // the status of Next
	Unprotect       // Next, without the finalizer
	Remove          // the claim was made for a pod that will not run
)

// ClaimPlan is what to do about a claim.
type ClaimPlan struct {
	Step Step
	Next *resourcev1.ResourceClaim
}

// PlanClaim says what a claim needs now: users that have ended are forgotten, devices that nobody uses are given back, and
// a claim that belongs to a pod which will not run is removed. user asks for a pod in the claim's namespace.
func PlanClaim(c *resourcev1.ResourceClaim, user func(name, uid string) User) ClaimPlan {
	var valid []resourcev1.ResourceClaimConsumerReference
	for _, r := range c.Status.ReservedFor {
		// What is not a pod, others have to take away.
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

// owningPod is the pod that a claim was made for.
func owningPod(c *resourcev1.ResourceClaim) (name, uid string) {
	if ref := metav1.GetControllerOfNoCopy(c); ref != nil && ref.Kind == "Pod" && ref.APIVersion == "v1" {
		return ref.Name, string(ref.UID)
	}
	return "", ""
}
