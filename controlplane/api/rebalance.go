package api

// Annotations of workloads that allow and record the rebalancing of their pods.
const (
	// RebalanceAnnotation with the value "true" on a Deployment, ReplicaSet or StatefulSet allows
	// moving its pods if the scheduler would now clearly prefer another node. Pods are moved one at
	// a time and within disruption budgets.
	RebalanceAnnotation = "keelson.dev/rebalance"
	// RebalancedAnnotation on the workload is the time at which one of its pods was last selected
	// to be moved.
	RebalancedAnnotation = "keelson.dev/rebalanced-at"
)
