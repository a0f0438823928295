package api

// Annotations of the restart on changed configuration.
const (
	// RestartAnnotation asks with "true" that the pods of a Deployment, StatefulSet or DaemonSet are replaced, as by an
	// update, when what a ConfigMap or Secret holds that their template refers to has changed.
	RestartAnnotation = "keelson.dev/restart-on-config-change"
	// ConfigSeenAnnotation keeps with the workload which contents its pods were made for.
	ConfigSeenAnnotation = "keelson.dev/config-seen"
	// ConfigAnnotation of the template is what changes with the contents.
	ConfigAnnotation = "keelson.dev/config"
)
