package kinds

import (
	"slices"

	"keelson.dev/keelson/controlplane/api"
)

// workloads are the kinds whose controllers make pods, scale who makes them, and bound what is made of them in a
// namespace.
func workloads() []*api.Kind {
	return slices.Concat([]*api.Kind{
		replicationControllerKind(), podTemplateKind(), limitRangeKind(), resourceQuotaKind(),
		statefulSetKind(), daemonSetKind(), controllerRevisionKind(),
		jobKind(), cronJobKind(),
	}, autoscalerKinds())
}
