package core_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestServiceValidation(t *testing.T) {
	svc := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"good", svc("ports: [{port: 80}]"), nil},
		{"name of a digit", "{metadata: {name: 1a}, spec: {ports: [{port: 80}]}}", nil},
		{"name with a dot", "{metadata: {name: a.b}, spec: {ports: [{port: 80}]}}",
			[]string{`metadata.name: Invalid value: "a.b": must not contain dots`}},
		{"no ports", svc("selector: {a: b}"), []string{"spec.ports: Required value"}},
		{"headless needs none", svc("clusterIP: None"), nil},
		{"type", svc("type: Global, ports: [{port: 80}]"), []string{`spec.type: Unsupported value: "Global"`}},
		{"port names", svc("ports: [{port: 80}, {port: 81, name: b}]"), []string{"spec.ports[0].name: Required value"}},
		{"same port", svc("ports: [{port: 80, name: a}, {port: 80, name: b}]"),
			[]string{`spec.ports[1]: Duplicate value: ` +
				`{"Name":"","Protocol":"TCP","AppProtocol":null,"Port":80,"TargetPort":0,"NodePort":0}`}},
		{"port", svc("ports: [{port: 0}]"), []string{"spec.ports[0].port: Invalid value: 0",
			"spec.ports[0].targetPort: Invalid value: 0"}},
		{"node port of ClusterIP", svc("ports: [{port: 80, nodePort: 30080}]"),
			[]string{"spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"}},
		{"any node port", svc("type: NodePort, ports: [{port: 80, nodePort: 80}]"), nil}, // the allocator has the range
		{"same node port",
			svc("type: NodePort, ports: [{port: 80, nodePort: 30080, name: a}, {port: 81, nodePort: 30080, name: b}]"),
			[]string{"spec.ports[1].nodePort: Duplicate value: 30080"}},
		{"address", svc("clusterIP: 10.96.0, ports: [{port: 80}]"),
			[]string{`spec.clusterIPs[0]: Invalid value: "10.96.0"`}},
		{"external name", svc("type: ExternalName"), []string{"spec.externalName: Required value"}},
		{"headless node port", svc("type: NodePort, clusterIP: None, ports: [{port: 80}]"),
			[]string{`spec.clusterIPs[0]: Invalid value: "None": may not be set to 'None' for NodePort services`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			kindstest.CheckErrors(t, c.name, kindstest.ValidationErrors[*corev1.Service](t, c.text), c.want...)
		})
	}
}
