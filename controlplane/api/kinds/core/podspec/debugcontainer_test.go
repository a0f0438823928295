package podspec_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// newEphemeral parses an ephemeral container.
func newEphemeral(t *testing.T, text string) corev1.EphemeralContainer {
	t.Helper()
	var c corev1.EphemeralContainer
	if err := yaml.UnmarshalStrict([]byte(text), &c); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

// F128: what may be added as an ephemeral container, with the errors of Kubernetes.
func TestEphemeralContainersAreValidated(t *testing.T) {
	const at, forbidden = "spec.ephemeralContainers[0].", ": Forbidden: cannot be set for an Ephemeral Container"
	for _, c := range []struct{ text, want string }{
		{"{name: d, image: t}", ""},
		{"{name: d, image: t, targetContainerName: c, command: [sh], args: [-c, x], workingDir: /, stdin: true, " +
			"stdinOnce: true, tty: true, env: [{name: E, value: v}], envFrom: [{configMapRef: {name: m}}], " +
			"volumeMounts: [{name: v, mountPath: /v}], securityContext: {capabilities: {add: [SYS_PTRACE]}}, " +
			"terminationMessagePath: /m, terminationMessagePolicy: File, imagePullPolicy: Never}", ""},
		{"{name: d, image: t, targetContainerName: i}", ""},
		{"{image: t}", at + "name: Required value"},
		{"{name: d}", at + "image: Required value"},
		{"{name: d, image: ' t'}", kindstest.InvalidText(at+"image", " t",
			"must not have leading or trailing whitespace")},
		{"{name: c, image: t}", at + `name: Duplicate value: "c"`},
		{"{name: i, image: t}", at + `name: Duplicate value: "i"`},
		{"{name: D, image: t}", kindstest.InvalidText(at+"name", "D", utilvalidation.IsDNS1123Label("D")[0])},
		{"{name: d, image: t, targetContainerName: none}", at + `targetContainerName: Not found: "none"`},
		{"{name: d, image: t, targetContainerName: d}", at + `targetContainerName: Not found: "d"`},
		{"{name: d, image: t, volumeMounts: [{name: w, mountPath: /w}]}", at + `volumeMounts[0].name: Not found: "w"`},
		{"{name: d, image: t, ports: [{containerPort: 80}]}", at + "ports" + forbidden},
		{"{name: d, image: t, resources: {requests: {cpu: 1}}}", at + "resources" + forbidden},
		{"{name: d, image: t, resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}]}",
			at + "resizePolicy" + forbidden},
		{"{name: d, image: t, restartPolicy: Always}", at + "restartPolicy" + forbidden},
		{"{name: d, image: t, livenessProbe: {exec: {command: [a]}}}", at + "livenessProbe" + forbidden},
		{"{name: d, image: t, readinessProbe: {exec: {command: [a]}}}", at + "readinessProbe" + forbidden},
		{"{name: d, image: t, startupProbe: {exec: {command: [a]}}}", at + "startupProbe" + forbidden},
		{"{name: d, image: t, lifecycle: {preStop: {exec: {command: [a]}}}}", at + "lifecycle" + forbidden},
		{"{name: d, image: t, volumeMounts: [{name: v, mountPath: /v, subPath: s}]}",
			at + "volumeMounts[0].subPath" + forbidden},
		{"{name: d, image: t, volumeMounts: [{name: v, mountPath: /v, subPathExpr: $(E)}]}",
			at + "volumeMounts[0].subPathExpr" + forbidden},
	} {
		t.Run(c.text, func(t *testing.T) {
			kindstest.CheckChanges(t, "{metadata: {name: a}, spec: {initContainers: [{name: i, image: i}], volumes: "+
				"[{name: v, emptyDir: {}}], containers: [{name: c, image: i}]}}",
				kindstest.Change[*corev1.Pod]{Sub: "ephemeralcontainers", Generation: 2, Want: c.want,
					Change: func(p *corev1.Pod) {
						p.Spec.EphemeralContainers = []corev1.EphemeralContainer{newEphemeral(t, c.text)}
					}})
		})
	}
}

// F128: ephemeral containers are only added. The subresource changes nothing else of the pod.
func TestEphemeralContainersAreOnlyAdded(t *testing.T) {
	const list = "spec.ephemeralContainers: Forbidden: "
	add := func(text string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, newEphemeral(t, text))
		}
	}
	change := func(f func(c *corev1.EphemeralContainer)) func(*corev1.Pod) {
		return func(p *corev1.Pod) { f(&p.Spec.EphemeralContainers[0]) }
	}
	sub := func(generation int64, want string, f func(*corev1.Pod)) kindstest.Change[*corev1.Pod] {
		return kindstest.Change[*corev1.Pod]{Sub: "ephemeralcontainers", Generation: generation, Want: want, Change: f}
	}
	const text = "{metadata: {name: a}, spec: {containers: [{name: c, image: i}], ephemeralContainers: " +
		"[{name: d, image: t}, {name: e, image: t}]}}"
	kindstest.CheckChanges(t, text,
		sub(1, "", func(*corev1.Pod) {}),
		sub(2, "", add("{name: f, image: t}")),
		sub(2, "spec.ephemeralContainers[2].name: Duplicate value: \"d\"\n"+list+
			"existing ephemeral containers \"d\" may not be changed\nchanged: image", add("{name: d, image: u}")),
		sub(2, "", func(p *corev1.Pod) {
			l := p.Spec.EphemeralContainers
			l[0], l[1] = l[1], l[0]
		}),
		sub(2, list+"existing ephemeral containers \"d\" may not be removed\n", func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = p.Spec.EphemeralContainers[1:]
		}),
		sub(2, list+"existing ephemeral containers \"d\" may not be changed\nchanged: image",
			change(func(c *corev1.EphemeralContainer) { c.Image = "u" })),
		sub(2, list+"existing ephemeral containers \"d\" may not be changed\nchanged: targetContainerName",
			change(func(c *corev1.EphemeralContainer) { c.TargetContainerName = "c" })),
	)
	stored := kindstest.Load[*corev1.Pod](t, kindstest.PodText)
	added, wrong := kindstest.RunUpdate(t, stored, "ephemeralcontainers", func(p *corev1.Pod) {
		add("{name: d, image: tools}")(p)
		p.Spec.Containers[0].Image, p.Labels = "other", map[string]string{"a": "b"}
	})
	if wrong != nil || added.Spec.Containers[0].Image != "nginx" || added.Labels != nil ||
		added.Spec.EphemeralContainers[0].ImagePullPolicy != corev1.PullAlways ||
		added.Spec.EphemeralContainers[0].TerminationMessagePath != corev1.TerminationMessagePathDefault ||
		added.Generation != stored.Generation+1 {
		t.Errorf("errors at %q, %+v", wrong, added.Spec)
	}
}

// F128: new pods and pod templates have no ephemeral containers.
func TestEphemeralContainersOnlyInRunningPods(t *testing.T) {
	const list = "ephemeralContainers: [{name: d, image: t}]"
	kindstest.CheckRefused[*corev1.Pod](t, kindstest.BadObject{Text: podWith(list),
		Want: "spec.ephemeralContainers: Forbidden: cannot be set on create"})
	kindstest.CheckRefused[*appsv1.Deployment](t, kindstest.BadObject{Text: "{metadata: {name: a}, spec: {selector: " +
		"{matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}], " +
		list + "}}}}",
		Want: "spec.template.spec.ephemeralContainers: Forbidden: ephemeral containers not allowed in pod template"})
}
