package kinds

import (
	"slices"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// workloads are the kinds whose controllers make pods, scale who makes them, and bound what is made of them in a
// namespace.
func workloads() []*api.Kind {
	return slices.Concat([]*api.Kind{
		core.ReplicationControllerKind(), core.PodTemplateKind(), core.LimitRangeKind(), core.ResourceQuotaKind(),
		statefulSetKind(), daemonSetKind(), controllerRevisionKind(),
		jobKind(), cronJobKind(),
	}, autoscalerKinds())
}
