package apps_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestDeploymentDefaults(t *testing.T) {
	kindstest.CheckDefaults[*appsv1.Deployment](t, `
metadata: {name: a}
spec:
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec:
      containers: [{name: c, image: "x:1", resources: {limits: {cpu: "1"}}}]
`, `
spec:
  replicas: 1
  revisionHistoryLimit: 10
  progressDeadlineSeconds: 600
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 25%, maxUnavailable: 25%}}
  selector: {matchLabels: {app: a}}
  template:
    metadata: {labels: {app: a}}
    spec:
      restartPolicy: Always
      dnsPolicy: ClusterFirst
      schedulerName: default-scheduler
      securityContext: {}
      terminationGracePeriodSeconds: 30
      containers:
      - {name: c, image: "x:1", imagePullPolicy: IfNotPresent, resources: {limits: {cpu: "1"}}, terminationMessagePath: /dev/termination-log, terminationMessagePolicy: File}
`)
}
