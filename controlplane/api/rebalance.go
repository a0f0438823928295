package api

// Annotations of workloads for rebalancing pods.
const (
	// RebalanceAnnotation with the value "true" on a Deployment, ReplicaSet or StatefulSet allows
	// moving its pods when the scheduler would now clearly prefer another node. Pods move one at a
	// time and within disruption budgets.
	RebalanceAnnotation = "keelson.dev/rebalance"
	// RebalancedAnnotation on the workload is the time at which one of its pods was last chosen to
	// move.
	RebalancedAnnotation = "keelson.dev/rebalanced-at"
)
