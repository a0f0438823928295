package api

// RollbackAnnotation asks with "true" that a Deployment whose rollout fails is set back to its last complete revision:
// when its progress deadline passes, or when a pod of the new template ends again and again.
const RollbackAnnotation = "keelson.dev/rollback-on-failure"
