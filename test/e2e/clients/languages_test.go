package clients

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/test/testenv"
)

// tea is a CRD for the objects that the programs make.
const tea = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: teas.GROUP}
spec:
  group: GROUP
  scope: Namespaced
  names: {plural: teas, singular: tea, kind: Tea}
  versions:
  - name: v1
    served: true
    storage: true
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec: {type: object, properties: {grams: {type: integer}, cups: {type: integer, default: 1}}}
`

// F16: programs written with the client libraries of other languages list, watch, write in every way, follow a log, run
// a command in a pod and use a custom resource.
func TestClientsOfOtherLanguages(t *testing.T) {
	for _, c := range []struct{ name, group, program, script string }{
		{"node", "node.example.com", "node", "client.mjs"},
		{"python", "python.example.com", "/usr/bin/python3", "client.py"},
	} {
		t.Run(c.name, func(t *testing.T) {
			libraries := clientProgram(t, "node")
			if c.name == "python" && exec.Command(c.program, "-c", "import kubernetes").Run() != nil {
				skipOrFail(t, "Debian's python3-kubernetes is not installed: scripts/setup clients")
			}
			file := filepath.Join(t.TempDir(), "crd.yaml")
			if err := os.WriteFile(file, []byte(strings.ReplaceAll(tea, "GROUP", c.group)), 0o600); err != nil {
				t.Fatal(err)
			}
			testenv.Kctl(t, "apply", "-f", file)
			t.Cleanup(func() { testenv.Kctl(t, "delete", "-f", file) })
			testenv.Kctl(t, "wait", "--for=condition=Established", "crd/teas."+c.group, "--timeout=180s")
			cmd := exec.Command("timeout", "300", c.program, filepath.Join("testdata", c.script))
			cmd.Env = append(os.Environ(), "KUBECONFIG="+testenv.Lab().Config.Kubeconfig,
				"NAMESPACE="+testenv.Namespace(t),
				"CLIENT_FOLDER="+libraries)
			out, err := cmd.CombinedOutput()
			if err != nil || !strings.HasSuffix(string(out), "all is well\n") {
				t.Errorf("%s: %v\n%s", c.script, err, out)
			}
		})
	}
}
