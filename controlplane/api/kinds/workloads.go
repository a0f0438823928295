package kinds

import (
	"slices"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/apps"
	"keelson.dev/keelson/controlplane/api/kinds/autoscaling"
	"keelson.dev/keelson/controlplane/api/kinds/batch"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// workloads are the kinds whose controllers make pods, scale who makes them, and bound what is made of them in a
// namespace.
func workloads() []*api.Kind {
	return slices.Concat([]*api.Kind{
		core.ReplicationControllerKind(), core.PodTemplateKind(), core.LimitRangeKind(), core.ResourceQuotaKind(),
		apps.StatefulSetKind(), apps.DaemonSetKind(), apps.ControllerRevisionKind(),
		batch.JobKind(), batch.CronJobKind(),
	}, autoscaling.AutoscalerKinds())
}
