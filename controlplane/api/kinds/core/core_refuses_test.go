package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F38: the content of each Secret type.
func TestSecretContent(t *testing.T) {
	const redacted = "<secret contents redacted>"
	secret := func(kind, data string) string {
		return "{metadata: {name: a}, type: kubernetes.io/" + kind + ", data: {" + data + "}}"
	}
	kindstest.CheckRefused[*corev1.Secret](t,
		kindstest.BadObject{Text: secret("dockerconfigjson", ".dockerconfigjson: e30="), Want: ""},
		kindstest.BadObject{Text: secret("dockerconfigjson", ".dockerconfigjson: Z2FyYmFnZQ=="),
			Want: kindstest.InvalidText("data[.dockerconfigjson]", redacted,
				"invalid character 'g' looking for beginning of value")},
		kindstest.BadObject{Text: secret("dockerconfigjson", ".dockerconfigjson: W10="),
			Want: kindstest.InvalidText("data[.dockerconfigjson]", redacted,
				"json: cannot unmarshal array into Go value of type map[string]interface {}")},
		kindstest.BadObject{Text: secret("dockerconfigjson", ""), Want: "data[.dockerconfigjson]: Required value"},
		kindstest.BadObject{Text: secret("dockercfg", ".dockercfg: Z2FyYmFnZQ=="),
			Want: kindstest.InvalidText("data[.dockercfg]", redacted,
				"invalid character 'g' looking for beginning of value")},
		kindstest.BadObject{Text: secret("dockercfg", ""), Want: "data[.dockercfg]: Required value"},
		kindstest.BadObject{Text: secret("ssh-auth", "ssh-privatekey: e30="), Want: ""},
		kindstest.BadObject{Text: secret("ssh-auth", "ssh-privatekey: ''"),
			Want: "data[ssh-privatekey]: Required value"},
		kindstest.BadObject{Text: secret("ssh-auth", ""), Want: "data[ssh-privatekey]: Required value"},
		kindstest.BadObject{Text: secret("basic-auth", "password: ''"), Want: ""},
		kindstest.BadObject{Text: secret("basic-auth", ""),
			Want: "data[username]: Required value\ndata[password]: Required value"},
		kindstest.BadObject{Text: secret("tls", "tls.crt: ''"), Want: "data[tls.key]: Required value"},
		kindstest.BadObject{Text: secret("service-account-token", ""),
			Want: "metadata.annotations[kubernetes.io/service-account.name]: Required value"},
		kindstest.BadObject{Text: "{metadata: {name: a}, type: bootstrap.kubernetes.io/token}", Want: ""},
	)
}

// F38: an Event with eventTime names its reporter, whichever API makes it.
func TestTimedEvents(t *testing.T) {
	const name = "name part must be non-empty"
	const form = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with " +
		"an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is " +
		"'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
	const timed = `metadata: {name: a, namespace: ns}, eventTime: "2026-01-01T00:00:00.000000Z"`
	const pod = ", involvedObject: {kind: Pod, namespace: ns}"
	kindstest.CheckRefused[*corev1.Event](t,
		kindstest.BadObject{Text: "{metadata: {name: a, namespace: ns}" + pod + "}", Want: ""},
		kindstest.BadObject{Text: "{" + timed + pod +
			", reportingComponent: example.com/c, reportingInstance: i, action: a, reason: r}", Want: ""},
		kindstest.BadObject{Text: "{" + timed + pod + "}",
			Want: "reportingComponent: Required value\n" + kindstest.InvalidText("reportingComponent", "", name) +
				"\n" +
				kindstest.InvalidText("reportingComponent", "", form) +
				"\nreportingInstance: Required value\naction: Required value\nreason: Required value"},
		kindstest.BadObject{Text: "{metadata: {name: a, namespace: kube-system}, involvedObject: {kind: Node}}",
			Want: kindstest.InvalidText("involvedObject.namespace", "", "does not match event.namespace")},
		kindstest.BadObject{Text: "{metadata: {name: a, namespace: default}, involvedObject: {kind: Node}}", Want: ""},
	)
	kindstest.CheckRefused[*eventsv1.Event](t,
		kindstest.BadObject{Text: "{" + timed + ", type: Normal, regarding: {namespace: other}, reportingController: " +
			"c, reportingInstance: i, action: a, reason: r}", Want: ""},
		kindstest.BadObject{Text: "{" + timed + ", type: Normal, reportingController: c, reportingInstance: i, " +
			"action: a, reason: r}",
			Want: kindstest.InvalidText("regarding.namespace", "", "does not match event.namespace")},
	)
}

// F38: quotas of counted objects are whole numbers; requests of extended resources need not be.
func TestQuotaQuantities(t *testing.T) {
	kindstest.CheckRefused[*corev1.ResourceQuota](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hard: {count/x: 100m}}}",
			Want: kindstest.InvalidText("spec.hard[count/x]", "100m", "must be an integer")},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {hard: {requests.example.com/a: 100m}}}", Want: ""},
	)
}
