package api

// Annotations for restarting workloads when their configuration changes.
const (
	// RestartAnnotation with the value "true" on a Deployment, StatefulSet or DaemonSet enables a
	// restart on configuration changes. Its pods are replaced, as by an update, when the contents
	// of a ConfigMap or Secret change that the pod template references.
	RestartAnnotation = "keelson.dev/restart-on-config-change"
	// ConfigSeenAnnotation on the workload identifies the configuration contents for which its pods
	// were created.
	ConfigSeenAnnotation = "keelson.dev/config-seen"
	// ConfigAnnotation on the pod template identifies the configuration contents. Its change
	// triggers the rollout.
	ConfigAnnotation = "keelson.dev/config"
)
