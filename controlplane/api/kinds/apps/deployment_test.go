package apps_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// What asks for a rollback says so in one of two words.
func TestRollbackAnnotation(t *testing.T) {
	of := func(v string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/rollback-on-failure: "` + v + `"}}, spec: {replicas: 1, selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	kindstest.CheckRefused[*appsv1.Deployment](t,
		kindstest.BadObject{of("true"), ""}, kindstest.BadObject{of("false"), ""},
		kindstest.BadObject{of("yes"), `metadata.annotations[keelson.dev/rollback-on-failure]: Unsupported value: "yes": supported values: "true", "false"`})
}

// So does what asks for new pods when their configuration changes.
func TestRestartAnnotation(t *testing.T) {
	of := func(v, more string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/restart-on-config-change: "` + v + `"}}, spec: {` + more + `selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	const no = `metadata.annotations[keelson.dev/restart-on-config-change]: Unsupported value: "": supported values: "true", "false"`
	kindstest.CheckRefused[*appsv1.Deployment](t, kindstest.BadObject{of("true", "replicas: 1, "), ""}, kindstest.BadObject{of("", "replicas: 1, "), no})
	kindstest.CheckRefused[*appsv1.StatefulSet](t, kindstest.BadObject{of("false", "serviceName: s, "), ""}, kindstest.BadObject{of("", "serviceName: s, "), no})
	kindstest.CheckRefused[*appsv1.DaemonSet](t, kindstest.BadObject{of("true", ""), ""}, kindstest.BadObject{of("", ""), no})
}

// And what asks to be rebalanced.
func TestRebalanceAnnotation(t *testing.T) {
	of := func(v, more string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/rebalance: "` + v + `"}}, spec: {replicas: 1, ` + more + `selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	const no = `metadata.annotations[keelson.dev/rebalance]: Unsupported value: "slowly": supported values: "true", "false"`
	kindstest.CheckRefused[*appsv1.Deployment](t, kindstest.BadObject{of("true", ""), ""}, kindstest.BadObject{of("slowly", ""), no})
	kindstest.CheckRefused[*appsv1.ReplicaSet](t, kindstest.BadObject{of("false", ""), ""}, kindstest.BadObject{of("slowly", ""), no})
	kindstest.CheckRefused[*appsv1.StatefulSet](t, kindstest.BadObject{of("true", "serviceName: s, "), ""}, kindstest.BadObject{of("slowly", "serviceName: s, "), no})
}
