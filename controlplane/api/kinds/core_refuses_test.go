package kinds

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
)

const notQualified = "name is neither a standard finalizer name nor is it fully qualified"

// F38: a finalizer of a built-in kind is standard or has a domain.
func TestFinalizerNames(t *testing.T) {
	refuses[*corev1.ConfigMap](t,
		bad{"{metadata: {name: a, finalizers: [nodomain]}}", invalidText("metadata.finalizers[0]", "nodomain", notQualified)},
		bad{"{metadata: {name: a, finalizers: [example.com/x, kubernetes, orphan, a.b]}}", invalidText("metadata.finalizers[3]", "a.b", notQualified)},
		bad{"{metadata: {name: a, finalizers: [foregroundDeletion]}}", ""},
	)
	refuses[*storagev1.CSIDriver](t, bad{"{metadata: {name: a, finalizers: [x]}, spec: {}}", invalidText("metadata.finalizers[0]", "x", notQualified)})
	refuses[*appsv1.ControllerRevision](t, bad{"{metadata: {name: a, finalizers: [x]}, data: {}, revision: 1}", invalidText("metadata.finalizers[0]", "x", notQualified)})
	// Kubernetes never qualified those of budgets and of core Events.
	refuses[*policyv1.PodDisruptionBudget](t, bad{"{metadata: {name: a, finalizers: [x]}, spec: {minAvailable: 1, selector: {}}}", ""})
	refuses[*corev1.Event](t, bad{"{metadata: {name: a, finalizers: [x]}, involvedObject: {kind: Pod}}", ""})
	changes(t, "{metadata: {name: a}}", changed[*corev1.Namespace]{sub: "finalize",
		change: func(ns *corev1.Namespace) { ns.Spec.Finalizers = []corev1.FinalizerName{"kubernetes", "nodomain"} },
		want:   invalidText("spec.finalizers[1]", "nodomain", notQualified)})
}

// F38: the content of each Secret type.
func TestSecretContent(t *testing.T) {
	const redacted = "<secret contents redacted>"
	secret := func(kind, data string) string {
		return "{metadata: {name: a}, type: kubernetes.io/" + kind + ", data: {" + data + "}}"
	}
	refuses[*corev1.Secret](t,
		bad{secret("dockerconfigjson", ".dockerconfigjson: e30="), ""},
		bad{secret("dockerconfigjson", ".dockerconfigjson: Z2FyYmFnZQ=="),
			invalidText("data[.dockerconfigjson]", redacted, "invalid character 'g' looking for beginning of value")},
		bad{secret("dockerconfigjson", ".dockerconfigjson: W10="),
			invalidText("data[.dockerconfigjson]", redacted, "json: cannot unmarshal array into Go value of type map[string]interface {}")},
		bad{secret("dockerconfigjson", ""), "data[.dockerconfigjson]: Required value"},
		bad{secret("dockercfg", ".dockercfg: Z2FyYmFnZQ=="),
			invalidText("data[.dockercfg]", redacted, "invalid character 'g' looking for beginning of value")},
		bad{secret("dockercfg", ""), "data[.dockercfg]: Required value"},
		bad{secret("ssh-auth", "ssh-privatekey: e30="), ""},
		bad{secret("ssh-auth", "ssh-privatekey: ''"), "data[ssh-privatekey]: Required value"},
		bad{secret("ssh-auth", ""), "data[ssh-privatekey]: Required value"},
		bad{secret("basic-auth", "password: ''"), ""},
		bad{secret("basic-auth", ""), "data[username]: Required value\ndata[password]: Required value"},
		bad{secret("tls", "tls.crt: ''"), "data[tls.key]: Required value"},
		bad{secret("service-account-token", ""), "metadata.annotations[kubernetes.io/service-account.name]: Required value"},
		bad{"{metadata: {name: a}, type: bootstrap.kubernetes.io/token}", ""},
	)
}

// F38: an Event with eventTime names its reporter, whichever API makes it.
func TestTimedEvents(t *testing.T) {
	const name = "name part must be non-empty"
	const form = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric " +
		"character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
	const timed = `metadata: {name: a, namespace: ns}, eventTime: "2026-01-01T00:00:00.000000Z"`
	const pod = ", involvedObject: {kind: Pod, namespace: ns}"
	refuses[*corev1.Event](t,
		bad{"{metadata: {name: a, namespace: ns}" + pod + "}", ""},
		bad{"{" + timed + pod + ", reportingComponent: example.com/c, reportingInstance: i, action: a, reason: r}", ""},
		bad{"{" + timed + pod + "}", "reportingComponent: Required value\n" + invalidText("reportingComponent", "", name) + "\n" +
			invalidText("reportingComponent", "", form) + "\nreportingInstance: Required value\naction: Required value\nreason: Required value"},
		bad{"{metadata: {name: a, namespace: kube-system}, involvedObject: {kind: Node}}",
			invalidText("involvedObject.namespace", "", "does not match event.namespace")},
		bad{"{metadata: {name: a, namespace: default}, involvedObject: {kind: Node}}", ""},
	)
	refuses[*eventsv1.Event](t,
		bad{"{" + timed + ", type: Normal, regarding: {namespace: other}, reportingController: c, reportingInstance: i, action: a, reason: r}", ""},
		bad{"{" + timed + ", type: Normal, reportingController: c, reportingInstance: i, action: a, reason: r}",
			invalidText("regarding.namespace", "", "does not match event.namespace")},
	)
}

// F38: quotas of counted objects are whole numbers; requests of extended resources need not be.
func TestQuotaQuantities(t *testing.T) {
	refuses[*corev1.ResourceQuota](t,
		bad{"{metadata: {name: a}, spec: {hard: {count/x: 100m}}}", invalidText("spec.hard[count/x]", "100m", "must be an integer")},
		bad{"{metadata: {name: a}, spec: {hard: {requests.example.com/a: 100m}}}", ""},
	)
}
