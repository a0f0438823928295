package kinds

import (
	"slices"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/apps"
	"keelson.dev/keelson/controlplane/api/kinds/autoscaling"
	"keelson.dev/keelson/controlplane/api/kinds/batch"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// workloadKinds returns the kinds of workload controllers other than Deployment and ReplicaSet, of
// autoscalers, and of limits and quotas in a namespace.
func workloadKinds() []*api.Kind {
	return slices.Concat([]*api.Kind{
		core.ReplicationControllerKind(), core.PodTemplateKind(), core.LimitRangeKind(), core.ResourceQuotaKind(),
		apps.StatefulSetKind(), apps.DaemonSetKind(), apps.ControllerRevisionKind(),
		batch.JobKind(), batch.CronJobKind(),
	}, autoscaling.AutoscalerKinds())
}
