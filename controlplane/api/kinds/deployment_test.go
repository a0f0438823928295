package kinds

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
)

// What asks for a rollback says so in one of two words.
func TestRollbackAnnotation(t *testing.T) {
	of := func(v string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/rollback-on-failure: "` + v + `"}}, spec: {replicas: 1, selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	refuses[*appsv1.Deployment](t,
		bad{of("true"), ""}, bad{of("false"), ""},
		bad{of("yes"), `metadata.annotations[keelson.dev/rollback-on-failure]: Unsupported value: "yes": supported values: "true", "false"`})
}

// So does what asks for new pods when their configuration changes.
func TestRestartAnnotation(t *testing.T) {
	of := func(v, more string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/restart-on-config-change: "` + v + `"}}, spec: {` + more + `selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	const no = `metadata.annotations[keelson.dev/restart-on-config-change]: Unsupported value: "": supported values: "true", "false"`
	refuses[*appsv1.Deployment](t, bad{of("true", "replicas: 1, "), ""}, bad{of("", "replicas: 1, "), no})
	refuses[*appsv1.StatefulSet](t, bad{of("false", "serviceName: s, "), ""}, bad{of("", "serviceName: s, "), no})
	refuses[*appsv1.DaemonSet](t, bad{of("true", ""), ""}, bad{of("", ""), no})
}

// And what asks to be rebalanced.
func TestRebalanceAnnotation(t *testing.T) {
	of := func(v, more string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/rebalance: "` + v + `"}}, spec: {replicas: 1, ` + more + `selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	const no = `metadata.annotations[keelson.dev/rebalance]: Unsupported value: "slowly": supported values: "true", "false"`
	refuses[*appsv1.Deployment](t, bad{of("true", ""), ""}, bad{of("slowly", ""), no})
	refuses[*appsv1.ReplicaSet](t, bad{of("false", ""), ""}, bad{of("slowly", ""), no})
	refuses[*appsv1.StatefulSet](t, bad{of("true", "serviceName: s, "), ""}, bad{of("slowly", "serviceName: s, "), no})
}
