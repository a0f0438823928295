package api

// RollbackAnnotation with the value "true" rolls a failing Deployment back to its last complete
// revision. A rollout fails when its progress deadline passes, or when a pod of the new template
// exits repeatedly.
const RollbackAnnotation = "keelson.dev/rollback-on-failure"
