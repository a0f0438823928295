package kinds

import (
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"

	"keelson.dev/keelson/controlplane/api"
)

func priorityClassKind() *api.Kind {
	k := newKind[schedulingv1.PriorityClass, schedulingv1.PriorityClassList](names{
		gv: schedulingv1.SchemeGroupVersion, kind: "PriorityClass", plural: "priorityclasses", singular: "priorityclass", short: []string{"pc"},
	})
	return k
}

func podDisruptionBudgetKind() *api.Kind {
	k := newKind[policyv1.PodDisruptionBudget, policyv1.PodDisruptionBudgetList](names{
		gv: policyv1.SchemeGroupVersion, kind: "PodDisruptionBudget", plural: "poddisruptionbudgets", singular: "poddisruptionbudget", short: []string{"pdb"},
	})
	k.Namespaced = true
	return k
}
