package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestServiceDefaults(t *testing.T) {
	kindstest.CheckDefaults[*corev1.Service](t, `
metadata: {name: a}
spec: {selector: {app: a}, ports: [{port: 80}]}
`, `
spec:
  type: ClusterIP
  sessionAffinity: None
  internalTrafficPolicy: Cluster
  selector: {app: a}
  ports: [{port: 80, protocol: TCP, targetPort: 80}]
`)
	kindstest.CheckDefaults[*corev1.Service](t, `
metadata: {name: a}
spec: {type: LoadBalancer, sessionAffinity: ClientIP, clusterIP: 10.96.0.9, ports: [{port: 80, targetPort: http}]}
`, `
spec:
  type: LoadBalancer
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}
  internalTrafficPolicy: Cluster
  externalTrafficPolicy: Cluster
  allocateLoadBalancerNodePorts: true
  clusterIP: 10.96.0.9
  clusterIPs: [10.96.0.9]
  ports: [{port: 80, protocol: TCP, targetPort: http}]
`)
	kindstest.CheckDefaults[*corev1.Service](t,
		"{metadata: {name: a}, spec: {type: ExternalName, externalName: example.com}}",
		"{spec: {type: ExternalName, externalName: example.com, sessionAffinity: None}}")
}
