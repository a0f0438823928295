package api

// Annotations of rebalancing.
const (
	// RebalanceAnnotation asks with "true" that pods of a Deployment, ReplicaSet or StatefulSet move, one at a time and
	// within disruption budgets, when the scheduler would clearly place them elsewhere now.
	RebalanceAnnotation = "keelson.dev/rebalance"
	// RebalancedAnnotation keeps with the workload when a pod of it was last chosen to move.
	RebalancedAnnotation = "keelson.dev/rebalanced-at"
)
