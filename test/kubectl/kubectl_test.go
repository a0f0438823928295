package kubectl_test

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// rewrite replaces the expected output in the transcripts in testdata. In a transcript, a line with
// the prefix "$ " is a command, and with "!" a command that must fail. "< name" is a file for its
// standard input. The following lines are the output; values that differ between runs are replaced
// by <words>.
var rewrite = flag.Bool("rewrite", false, "overwrite the transcripts in testdata with the current output")

// eachKubectl runs f in parallel with each kubectl of this machine, each with a replica of its own.
func eachKubectl(t *testing.T, f func(t *testing.T, r *apiservertest.Replica, k *apiservertest.Kubectl)) {
	all := apiservertest.StockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			if !*rewrite { // all would write the same files
				t.Parallel()
			}
			r := apiservertest.StartReplica(t, nil)
			f(t, r, &apiservertest.Kubectl{T: t, Binary: binary, Config: r.Kubeconfig("admin", "system:masters"),
				Home: t.TempDir()})
		})
	}
}

// F1: a repeated apply changes nothing: the resourceVersion stays, and kubectl reports this.
// kubectl reports a pod that was given a token volume as "configured", with every Kubernetes. It
// compares the lengths of lists before it sends a patch that changes nothing.
func TestRepeatedApplyChangesNothing(t *testing.T) {
	data, err := os.ReadFile("testdata/again.yaml")
	if err != nil {
		t.Fatal(err)
	}
	plain := string(data)
	withToken := strings.NewReplacer("automountServiceAccountToken: false", "automountServiceAccountToken: true",
		"name: one,", "name: two,").Replace(plain)
	eachKubectl(t, func(t *testing.T, r *apiservertest.Replica, k *apiservertest.Kubectl) {
		versions := func() string {
			return k.Ok("", "get", "pods,configmaps", "-o", "jsonpath={.items[*].metadata.resourceVersion}")
		}
		for _, c := range []struct {
			manifest, again string
			flags           []string
		}{
			{plain, "configmap/motd unchanged\npod/one unchanged\n", nil},
			{withToken, "configmap/motd unchanged\npod/two configured\n", nil},
			{plain, "configmap/motd serverside-applied\npod/one serverside-applied\n",
				[]string{"--server-side", "--field-manager=again"}},
			{withToken, "configmap/motd serverside-applied\npod/two serverside-applied\n",
				[]string{"--server-side", "--field-manager=again"}},
		} {
			apply := append([]string{"apply", "-f", "-"}, c.flags...)
			k.Ok(c.manifest, apply...)
			before := versions()
			if said := k.Ok(c.manifest, apply...); said != c.again {
				t.Errorf("%v again: %q", apply, said)
			}
			if after := versions(); after != before {
				t.Errorf("%v again: versions %s became %s", apply, before, after)
			}
		}
	})
}

// varying matches output that differs from run to run, or between versions of kubectl.
var varying = []struct {
	form *regexp.Regexp
	word string
}{
	{regexp.MustCompile(`00-[0-9a-f]{32}-[0-9a-f]{16}-01`), "<trace>"},
	{regexp.MustCompile(`\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b`), "<uid>"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`), "<time>"},
	{regexp.MustCompile(`resourceVersion: "\d+"`), `resourceVersion: "<version>"`},
	{regexp.MustCompile(`\b10\.96\.\d+\.\d+\b( *)`), "<ip> "},
	{regexp.MustCompile(`\b3[0-2]\d{3}\b`), "<port>"},
	{regexp.MustCompile(`kube-api-access-[a-z0-9]{5}`), "kube-api-access-<x>"},
	{regexp.MustCompile(`(?m) +\d+(s|ms)$`), " <age>"},
	{regexp.MustCompile(`(?m)(\s)\d+s( +)`), "$1<age> "},
	{regexp.MustCompile(`https://127\.0\.0\.1:\d+`), "https://<server>"},
	{regexp.MustCompile(`ConfigMapOptional: +<nil>`), "Optional: false"},
	{regexp.MustCompile(`(?m)^ENUM:\n(?: +\S+\n)+`), ""}, // kubectl 1.27 does not show them
	{regexp.MustCompile(`(\S) +`), "$1 "},
	{regexp.MustCompile(`(?m)[ \t]+$`), ""},
	{regexp.MustCompile(`\n\n+`), "\n"},
}

// replaceVarying returns output with the replacements of varying.
func replaceVarying(out string) string {
	for _, v := range varying {
		out = v.form.ReplaceAllString(out, v.word)
	}
	return strings.TrimSpace(out)
}

// F1, F2, F4, F10, F12, F18, F28, F40: the commands of the transcripts have the expected output
// with unmodified kubectl programs.
func TestKubectlTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	eachKubectl(t, func(t *testing.T, r *apiservertest.Replica, k *apiservertest.Kubectl) {
		files := files
		// What older ones know nothing of. 1.32 was the first.
		if version := k.Ok("", "version", "--client"); !strings.Contains(version, "v1.27.") &&
			!strings.Contains(version, "v1.30.") {
			newer, err := filepath.Glob("testdata/newer/*.txt")
			if err != nil || len(newer) == 0 {
				t.Fatalf("no transcripts: %v", err)
			}
			files = append(slices.Clone(files), newer...)
		}
		for _, file := range files {
			t.Run(filepath.Base(file), func(t *testing.T) {
				data, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				kk := *k
				kk.T = t
				got := replay(&kk, string(data))
				if *rewrite {
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
					return
				}
				if got != string(data) {
					t.Errorf("the transcript differs:\n%s",
						cmp.Diff(strings.Split(string(data), "\n"), strings.Split(got, "\n")))
				}
			})
		}
	})
}

// replay runs the commands of a transcript and returns it with their current output.
func replay(k *apiservertest.Kubectl, transcript string) string {
	var out strings.Builder
	for line := range strings.SplitSeq(transcript, "\n") {
		command, isCommand := strings.CutPrefix(line, "$ ")
		if strings.HasPrefix(line, "#") {
			out.WriteString(line + "\n")
		}
		if !isCommand {
			continue
		}
		command, file, _ := strings.Cut(command, " < ")
		stdin := ""
		if file != "" {
			data, err := os.ReadFile(filepath.Join("testdata", file))
			if err != nil {
				k.T.Fatal(err)
			}
			stdin = string(data)
		}
		args := strings.Fields(strings.TrimPrefix(command, "!"))
		said, err := k.Run(stdin, args[1:]...)
		if mustFail := strings.HasPrefix(command, "!"); (err != nil) != mustFail {
			k.T.Errorf("%s: %v\n%s", command, err, said)
		}
		out.WriteString(line + "\n" + replaceVarying(said) + "\n\n")
	}
	return out.String()
}

// kubectl explains, applies and prints custom objects like built-in objects.
func TestKubectlOnCustomResources(t *testing.T) {
	eachKubectl(t, func(t *testing.T, r *apiservertest.Replica, k *apiservertest.Kubectl) {
		r.LeadDefinitions()
		k.Ok(apiservertest.Crontabs, "apply", "--server-side", "-f", "-")
		k.Ok("", "wait", "--for=condition=Established", "--timeout=20s", "crd/crontabs.stable.example.com")
		doc := apiservertest.Crontab("a", `{"cronSpec":"* * * * *","replicas":2}`)
		expect := func(out string, want ...string) {
			t.Helper()
			for _, w := range want {
				if !strings.Contains(out, w) {
					t.Errorf("no %q in:\n%s", w, out)
				}
			}
		}
		var out string
		r.Eventually(func() (err error) { // the models are published a moment later
			out, err = k.Run("", "explain", "crontab.spec")
			return err
		})
		expect(out, "CronTab", "cronSpec", "When it runs.")
		expect(k.Ok(doc, "apply", "--server-side", "-f", "-"), "crontab.stable.example.com/a serverside-applied")
		expect(k.Ok("", "get", "ct"), "SPEC", "REPLICAS", "* * * * *")
		expect(k.Ok(strings.Replace(doc, `"replicas":2`, `"replicas":3`, 1), "apply", "--server-side", "-f", "-"),
			"serverside-applied")
		expect(k.Ok("", "get", "ct", "a", "-o", "jsonpath={.spec.replicas}"), "3")
		expect(k.Fails(strings.Replace(doc, `"replicas":2`, `"replicas":99`, 1), "apply", "--server-side", "-f", "-"),
			"should be less than or equal to 10")
		expect(k.Ok("", "delete", "ct", "a"), "deleted")
	})
}
