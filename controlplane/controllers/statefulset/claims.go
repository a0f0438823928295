package statefulset

import (
	"context"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// forEachClaim calls do with each existing claim of the pod with this ordinal until do returns
// false.
func (r *reconciler) forEachClaim(set *appsv1.StatefulSet, ordinal int, do func(*corev1.PersistentVolumeClaim) bool) {
	for i := range set.Spec.VolumeClaimTemplates {
		c, ok := r.claims.Get(set.Namespace, claimName(set, &set.Spec.VolumeClaimTemplates[i], ordinal))
		if ok && !do(c) {
			return
		}
	}
}

// awaitsStaleClaim reports whether the pod with this ordinal cannot be created yet because of a
// claim for which isStaleClaim returns true. It then records an event.
func (r *reconciler) awaitsStaleClaim(set *appsv1.StatefulSet, ordinal int) (stale bool) {
	r.forEachClaim(set, ordinal, func(c *corev1.PersistentVolumeClaim) bool {
		if stale = isStaleClaim(set, podName(set, ordinal), c); stale {
			r.Term.Events.Eventf(set, corev1.EventTypeWarning, "FailedCreate",
				"Claim %s belongs to a deleted owner and is going to be deleted: pod %s is created after the deletion",
				c.Name, podName(set, ordinal))
		}
		return !stale
	})
	return stale
}

// reportOtherController records an event if another controller manages claim c, so that the
// retention policy of the set cannot apply to c.
func (r *reconciler) reportOtherController(set *appsv1.StatefulSet, pod string, c *corev1.PersistentVolumeClaim) {
	if (deletesWithSet(set) || deletesWhenScaled(set)) && otherController(set, pod, c) != nil {
		r.Term.Events.Eventf(set, corev1.EventTypeWarning, "ConflictingController", "PersistentVolumeClaim %s has a "+
			"conflicting OwnerReference that acts as a manging controller, the retention policy is ignored for "+
			"this claim", c.Name)
	}
}

// makeClaims creates the missing claims of the pod with this ordinal. It returns an error while one
// of the claims is being deleted. The pod must not be created before the claim no longer exists,
// because the pod would lose its data.
func (r *reconciler) makeClaims(ctx context.Context, set *appsv1.StatefulSet, ordinal int) error {
	for _, want := range newClaims(set, ordinal) {
		have, ok := r.claims.Get(want.Namespace, want.Name)
		if ok && have.DeletionTimestamp == nil {
			r.reportOtherController(set, podName(set, ordinal), have)
			continue
		}
		if ok {
			err := fmt.Errorf("claim %s is being deleted: pod %s is created after the deletion", want.Name,
				podName(set, ordinal))
			r.Term.Events.Event(set, corev1.EventTypeWarning, "FailedCreate", err.Error())
			return engine.RaceError("stateful set %s/%s: %w", set.Namespace, set.Name, err)
		}
		made, err := client.Create(ctx, r.Term.Client, want)
		switch {
		case apierrors.IsAlreadyExists(err):
			return engine.RaceError("claim %s/%s already exists", want.Namespace, want.Name)
		case err != nil:
			if !engine.IsNamespaceTerminating(err) && ctx.Err() == nil {
				r.Term.Events.Eventf(set, corev1.EventTypeWarning, "FailedCreate", "Error creating claim %s: %v",
					want.Name, err)
			}
			return fmt.Errorf("creating claim %s/%s of stateful set %s: %w", want.Namespace, want.Name, set.Name, err)
		}
		r.claims.RecordWrite(made)
		r.Term.Events.Eventf(set, corev1.EventTypeNormal, "SuccessfulCreate", "Created claim: %v", made.Name)
	}
	return nil
}

// tendClaims sets the owners of the claims of all pods according to the retention policy, and
// creates the claims that a pending pod lacks. Claims of a terminating pod that will be replaced
// are not changed while the policy deletes claims on a scale-down: they may still be deleted with
// that pod.
func (r *reconciler) tendClaims(ctx context.Context, s Snapshot) error {
	if len(s.Set.Spec.VolumeClaimTemplates) == 0 || s.Set.DeletionTimestamp != nil {
		return nil
	}
	wanted, condemned := s.partitionPods()
	var errs []error
	for _, st := range wanted {
		if st == nil || st.going && deletesWhenScaled(s.Set) {
			continue
		}
		if st.pod.Status.Phase == corev1.PodPending && !st.going {
			errs = append(errs, r.makeClaims(ctx, s.Set, st.ordinal))
		}
		errs = append(errs, r.setOwners(ctx, s.Set, st.ordinal, nil))
	}
	for _, st := range condemned {
		errs = append(errs, r.setOwners(ctx, s.Set, st.ordinal, st.pod))
	}
	return errors.Join(errs...)
}

// releaseClaims sets the owners of the claims of pod p, which is about to be deleted because the
// set was scaled down. It does nothing if p will be replaced.
func (r *reconciler) releaseClaims(ctx context.Context, s Snapshot, p *corev1.Pod) error {
	ordinal, _ := ordinalOf(s.Set, p.Name)
	from := firstOrdinal(s.Set)
	if ordinal >= from && ordinal < from+replicasOrDefault(s.Set) {
		return nil // the pod will be replaced
	}
	return r.setOwners(ctx, s.Set, ordinal, p)
}

// setOwners writes the owner references that the retention policy requires to the claims of the pod
// with this ordinal. condemned is that pod if a scale-down is about to delete it, otherwise nil.
func (r *reconciler) setOwners(ctx context.Context, set *appsv1.StatefulSet, ordinal int,
	condemned *corev1.Pod) (err error) {
	r.forEachClaim(set, ordinal, func(c *corev1.PersistentVolumeClaim) bool {
		if c.DeletionTimestamp != nil {
			return true
		}
		refs, changed := claimOwners(set, podName(set, ordinal), condemned, c)
		if !changed {
			return true
		}
		r.reportOtherController(set, podName(set, ordinal), c)
		next := c.DeepCopy()
		next.OwnerReferences = refs
		if next, err = client.Update(ctx, r.Term.Client, next); err != nil {
			err = fmt.Errorf("setting the owners of claim %s/%s of stateful set %s: %w", c.Namespace,
				c.Name, set.Name, err)
			return false
		}
		r.claims.RecordWrite(next)
		return true
	})
	return err
}
