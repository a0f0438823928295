package builtin

import (
	"context"
	"fmt"
	"slices"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/scheduling"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// podGroupProtection adds a finalizer to new PodGroups, so that a group is not removed before its
// pods have ended.
func podGroupProtection(_ context.Context, a *admission.Attempt) error {
	if g, ok := a.Whole.(*schedulingv1beta1.PodGroup); ok && a.CreatesObject() {
		addFinalizer(g, scheduling.PodGroupProtection)
	}
	return nil
}

// setGroupPriority sets the priority of a new PodGroup from its PriorityClass. In an update that
// omits the priority, as the manifest does, it restores the stored priority.
func setGroupPriority(
	ctx context.Context, c admission.Cluster, a *admission.Attempt, g *schedulingv1beta1.PodGroup,
) error {
	if was, ok := a.Stored.(*schedulingv1beta1.PodGroup); ok && a.UpdatesObject() {
		if g.Spec.Priority == nil && was.Spec.Priority != nil {
			value := *was.Spec.Priority
			g.Spec.Priority = &value
		}
		if g.Spec.PriorityClassName == "" {
			g.Spec.PriorityClassName = was.Spec.PriorityClassName
		}
	}
	if !a.CreatesObject() {
		return nil
	}
	value, _, err := classPriority(ctx, c, &g.Spec.PriorityClassName)
	if err != nil {
		return admission.NewForbidden(a, g, err)
	}
	if p := g.Spec.Priority; p != nil && *p != value {
		return admission.NewForbidden(a, g,
			fmt.Errorf("the integer value of priority (%d) must not be provided in podGroup spec; priority admission "+
				"controller computed %d from the given PriorityClass name", *p, value))
	}
	g.Spec.Priority = &value
	return nil
}

// podGroupWorkloadExists returns a plugin that rejects a new PodGroup if its Workload or template
// does not exist.
func podGroupWorkloadExists(c admission.Cluster) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		g, ok := a.Whole.(*schedulingv1beta1.PodGroup)
		if !ok || !a.CreatesObject() || g.Spec.WorkloadRef == nil {
			return nil
		}
		ref := g.Spec.WorkloadRef
		w, err := getWorkload(ctx, c, g.Namespace, ref.WorkloadName)
		switch {
		case err != nil:
			return admission.AsStatus(err)
		case w == nil || w.DeletionTimestamp != nil:
			return admission.NewForbidden(a, g, fmt.Errorf("PodGroup rejected: Workload %q not found",
				ref.WorkloadName))
		case !slices.ContainsFunc(w.Spec.PodGroupTemplates, func(t schedulingv1beta1.PodGroupTemplate) bool {
			return t.Name == ref.TemplateName
		}):
			return admission.NewForbidden(a, g,
				fmt.Errorf("PodGroup rejected: PodGroupTemplate %q not found in Workload %q", ref.TemplateName,
					ref.WorkloadName))
		}
		return nil
	}
}

// getWorkload returns a Workload; nil if it does not exist. It reads the store if the Workload is
// not cached, since another replica may have just created it.
func getWorkload(ctx context.Context, c admission.Cluster, namespace, name string) (
	*schedulingv1beta1.Workload, error,
) {
	if o, ok := c.Get(ctx, "workloads", namespace, name); ok {
		return o.(*schedulingv1beta1.Workload), nil
	}
	all, err := c.List(ctx, "workloads", namespace, true)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(all, func(o api.Object) bool { return o.GetName() == name }); i >= 0 {
		return all[i].(*schedulingv1beta1.Workload), nil
	}
	return nil, nil
}
