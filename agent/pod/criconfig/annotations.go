package criconfig

// Annotations on containers and sandboxes. They hold the values that a worker needs after a restart
// of the agent.
const (
	AnnotationHash          = "keelson.dev/container-hash"
	AnnotationDelay         = "keelson.dev/restart-delay"
	AnnotationRestartCount  = "io.kubernetes.container.restartCount"
	annotationMessagePath   = "io.kubernetes.container.terminationMessagePath"
	annotationMessagePolicy = "io.kubernetes.container.terminationMessagePolicy"
	AnnotationMessageFile   = "keelson.dev/termination-file" // path on the host
	AnnotationGrace         = "io.kubernetes.pod.terminationGracePeriod"
)
