package apps_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// The annotation for rollbacks accepts only "true" and "false".
func TestRollbackAnnotation(t *testing.T) {
	of := func(v string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/rollback-on-failure: "` + v +
			`"}}, spec: {replicas: 1, selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	kindstest.CheckRefused[*appsv1.Deployment](t,
		kindstest.BadObject{Text: of("true"), Want: ""}, kindstest.BadObject{Text: of("false"), Want: ""},
		kindstest.BadObject{Text: of("yes"), Want: `metadata.annotations[keelson.dev/rollback-on-failure]: ` +
			`Unsupported value: "yes": supported values: "true", "false"`})
}

// So does what asks for new pods when their configuration changes.
func TestRestartAnnotation(t *testing.T) {
	of := func(v, more string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/restart-on-config-change: "` + v +
			`"}}, spec: {` + more + `selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	const no = `metadata.annotations[keelson.dev/restart-on-config-change]: Unsupported value: "": supported ` +
		`values: "true", "false"`
	kindstest.CheckRefused[*appsv1.Deployment](t, kindstest.BadObject{Text: of("true", "replicas: 1, "), Want: ""},
		kindstest.BadObject{Text: of("", "replicas: 1, "), Want: no})
	kindstest.CheckRefused[*appsv1.StatefulSet](t, kindstest.BadObject{Text: of("false", "serviceName: s, "), Want: ""},
		kindstest.BadObject{Text: of("", "serviceName: s, "), Want: no})
	kindstest.CheckRefused[*appsv1.DaemonSet](t, kindstest.BadObject{Text: of("true", ""), Want: ""},
		kindstest.BadObject{Text: of("", ""), Want: no})
}

// And what asks to be rebalanced.
func TestRebalanceAnnotation(t *testing.T) {
	of := func(v, more string) string {
		return `{metadata: {name: a, namespace: default, annotations: {keelson.dev/rebalance: "` + v +
			`"}}, spec: {replicas: 1, ` + more + `selector: {matchLabels: {a: b}},
template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}`
	}
	const no = `metadata.annotations[keelson.dev/rebalance]: Unsupported value: "slowly": supported ` +
		`values: "true", "false"`
	kindstest.CheckRefused[*appsv1.Deployment](t, kindstest.BadObject{Text: of("true", ""), Want: ""},
		kindstest.BadObject{Text: of("slowly", ""), Want: no})
	kindstest.CheckRefused[*appsv1.ReplicaSet](t, kindstest.BadObject{Text: of("false", ""), Want: ""},
		kindstest.BadObject{Text: of("slowly", ""), Want: no})
	kindstest.CheckRefused[*appsv1.StatefulSet](t, kindstest.BadObject{Text: of("true", "serviceName: s, "), Want: ""},
		kindstest.BadObject{Text: of("slowly", "serviceName: s, "), Want: no})
}
