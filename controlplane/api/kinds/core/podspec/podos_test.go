package podspec_test

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// Pods that every Kubernetes accepts on a node with Linux and without SELinux are accepted, without a warning. F38
func TestFieldsWithoutEffectAreAccepted(t *testing.T) {
	for _, spec := range []string{
		"securityContext: {seLinuxOptions: {level: 's0:c0,c1'}, seLinuxChangePolicy: MountOption}, containers: " +
			"[{name: c, image: i, securityContext: {seLinuxOptions: {type: t}}}]",
		`securityContext: {windowsOptions: {runAsUserName: 'NT AUTHORITY\SYSTEM'}}, containers: [{name: c, image: i}]`,
		`os: {name: windows}, nodeSelector: {kubernetes.io/os: windows}, containers: [{name: c, image: i, ` +
			`securityContext: {windowsOptions: {runAsUserName: a}}}]`,
		"hostNetwork: true, containers: [{name: c, image: i, securityContext: {windowsOptions: {hostProcess: true}}}]",
	} {
		text := "{metadata: {name: a}, spec: {" + spec + "}}"
		kindstest.CheckRefused[*corev1.Pod](t, kindstest.BadObject{Text: text, Want: ""})
		p := kindstest.Load[*corev1.Pod](t, text)
		errs, warnings := fields.LoadTable().AnswersFor(p).FindIneffective(p, nil)
		if warnings = append(warnings, kinds.ObjectWarnings(p, nil)...); len(errs) > 0 || len(warnings) > 0 {
			t.Errorf("%s: %v, warnings %q", spec, errs, warnings)
		}
	}
}

// The fields of one operating system are refused in a pod of the other. F38
func TestFieldsOfTheOtherSystem(t *testing.T) {
	pod := func(spec, container string) string {
		return "{metadata: {name: a}, spec: {" + spec + ", containers: [{name: c, image: i" + container + "}]}}"
	}
	const at, c0 = "spec.securityContext.", "spec.containers[0].securityContext."
	const windows, linux = ": Forbidden: cannot be set for a windows pod",
		": Forbidden: windows options cannot be set for a linux pod"
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: pod("os: {name: linux}, securityContext: {windowsOptions: {}}",
			", securityContext: {windowsOptions: {}}"),
			Want: at + "windowsOptions" + linux + "\n" + c0 + "windowsOptions" + linux},
		kindstest.BadObject{Text: pod("os: {name: windows}, securityContext: {runAsUser: 1, seLinuxOptions: {}}",
			", securityContext: {privileged: false, capabilities: {}}"),
			Want: at + "runAsUser" + windows + "\n" + at + "seLinuxOptions" + windows + "\n" + c0 + "capabilities" +
				windows + "\n" + c0 + "privileged" + windows},
		kindstest.BadObject{Text: pod("os: {name: windows}, hostPID: true", ""), Want: "spec.hostPID" + windows},
		kindstest.BadObject{Text: pod("securityContext: {windowsOptions: {hostProcess: true}}", ""),
			Want: "spec.hostNetwork: Invalid value: false: hostNetwork must be true if pod contains any " +
				"hostProcess containers"},
		kindstest.BadObject{Text: pod("hostNetwork: true, securityContext: {windowsOptions: {hostProcess: true}}",
			", securityContext: {windowsOptions: {hostProcess: false}}"),
			Want: c0 + "windowsOptions.hostProcess: Invalid value: false: pod hostProcess value must be identical if " +
				"both are specified, was true"},
		kindstest.BadObject{Text: pod("securityContext: {seLinuxChangePolicy: Sometimes}", ""),
			Want: at + `seLinuxChangePolicy: Unsupported value: "Sometimes": supported values: ` +
				`"MountOption", "Recursive"`},
	)
	user := func(name string) string {
		return pod("securityContext: {windowsOptions: {runAsUserName: '"+name+"'}}", "")
	}
	const why = at + "windowsOptions.runAsUserName: Invalid value: "
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: user(""), Want: why + `"": runAsUserName cannot be an empty string`},
		kindstest.BadObject{Text: user(`a\b\c`),
			Want: why + `"a\\b\\c": runAsUserName cannot contain more than one backslash`},
		kindstest.BadObject{Text: user(`.a\b`), Want: why +
			`".a\\b": runAsUserName's Domain doesn't match the NetBios nor the DNS format`},
		kindstest.BadObject{Text: user(`a\`), Want: why + `"a\\": runAsUserName's User cannot be empty`},
		kindstest.BadObject{Text: user("a*"), Want: why +
			`"a*": runAsUserName's User cannot contain the following characters: "/\:;|=,+*?<>@[]`},
		kindstest.BadObject{Text: user(". ."), Want: why +
			`". .": runAsUserName's User cannot contain only periods or spaces`},
		kindstest.BadObject{Text: user(strings.Repeat("a", 105)),
			Want: why + `"` + strings.Repeat("a", 105) +
				`": runAsUserName's User length must not be longer than 104 characters`},
	)
}

// An AppArmor annotation is copied to the container without a profile, with Kubernetes' warning; it may not contradict a
// profile, name no container or change. F105
func TestAppArmorAnnotations(t *testing.T) {
	const key = "container.apparmor.security.beta.kubernetes.io/"
	pod := func(value, spec, container string) string {
		return "{metadata: {name: a, annotations: {" + key + "c: " + value + "}}, spec: {" + spec +
			"containers: [{name: c, image: i" + container + "}]}}"
	}
	warned := "metadata.annotations[" + key + `c]: deprecated since v1.30; use the "appArmorProfile" field instead`
	for _, c := range []struct{ text, profile, warning string }{
		{pod("unconfined", "", ""), "Unconfined", warned},
		{pod("localhost/mine", "", ""), "Localhost mine", warned},
		{pod("localhost/mine", "", ", securityContext: {appArmorProfile: {type: Localhost, localhostProfile: mine}}"),
			"Localhost mine", ""},
		{pod("unconfined", "securityContext: {appArmorProfile: {type: Unconfined}}, ", ""), "", ""},
		{pod("localhost/", "", ""), "", warned},
		{pod("unconfined", "os: {name: windows}, ", ""), "", ""},
	} {
		p := kindstest.Load[*corev1.Pod](t, c.text)
		if got := strings.Join(kinds.NewObjectWarnings(p), "\n"); got != c.warning {
			t.Errorf("%s: warns %q, want %q", c.text, got, c.warning)
		}
		kinds.All().ByType(p).Writes.PrepareCreate(p)
		got := ""
		if s := p.Spec.Containers[0].SecurityContext; s != nil && s.AppArmorProfile != nil {
			got = strings.TrimSpace(string(s.AppArmorProfile.Type) + " " +
				ptr.Deref(s.AppArmorProfile.LocalhostProfile, ""))
		}
		if got != c.profile {
			t.Errorf("%s: profile %q, want %q", c.text, got, c.profile)
		}
	}
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: strings.Replace(pod("unconfined", "", ""), key+"c", key+"d", 1),
			Want: kindstest.InvalidText("metadata.annotations["+key+"d]", "d", "container not found")},
		kindstest.BadObject{Text: pod("mine", "", ""),
			Want: kindstest.InvalidText("metadata.annotations["+key+"c]", "mine",
				`invalid AppArmor profile name: "mine"`)},
		kindstest.BadObject{Text: pod("unconfined", "", ", securityContext: {appArmorProfile: {type: RuntimeDefault}}"),
			Want: "spec.containers[0].securityContext.appArmorProfile.type: Forbidden: apparmor type in annotation " +
				"and field must match"},
		kindstest.BadObject{Text: pod("localhost/a", "",
			", securityContext: {appArmorProfile: {type: Localhost, localhostProfile: b}}"),
			Want: "spec.containers[0].securityContext.appArmorProfile.localhostProfile: Forbidden: apparmor profile " +
				"in annotation and field must match"},
	)
	kindstest.CheckRefused[*appsv1.Deployment](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {selector: {matchLabels: {a: b}}, " +
			"template: {metadata: {labels: {a: b}, annotations: {" +
			key + "d: unconfined}}, spec: {containers: [{name: c, image: i}]}}}}",
			Want: kindstest.InvalidText("spec.template.annotations["+key+"d]", "d", "container not found")})
	kindstest.CheckChanges(t, pod("unconfined", "", ""),
		kindstest.Change[*corev1.Pod]{Change: func(p *corev1.Pod) { p.Annotations = nil },
			Want:       "metadata.annotations[" + key + "c]: Forbidden: may not remove or update AppArmor annotations",
			Generation: 1},
		kindstest.Change[*corev1.Pod]{Change: func(p *corev1.Pod) { p.Annotations[key+"d"] = "unconfined" },
			Want: kindstest.InvalidText("metadata.annotations["+key+"d]", "d", "container not found") +
				"\nmetadata.annotations[" + key + "d]: Forbidden: may not add AppArmor annotations", Generation: 1})
}
