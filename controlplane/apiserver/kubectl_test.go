package apiserver

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// stockKubectls returns the paths of the kubectl binaries of this machine, by name.
func stockKubectls() map[string]string {
	found := map[string]string{}
	dirs := append(filepath.SplitList(os.Getenv("PATH")), "/usr/lib/google-cloud-sdk/bin")
	for _, name := range []string{"kubectl", "kubectl.1.27", "kubectl.1.30", "kubectl.1.33"} {
		for _, dir := range dirs {
			path := filepath.Join(dir, name)
			if info, err := os.Stat(path); err == nil && info.Mode()&0o111 != 0 && found[name] == "" {
				found[name] = path
			}
		}
	}
	return found
}

// kubectl is a kubectl binary with a kubeconfig.
type kubectl struct {
	t      testing.TB
	binary string
	config string
	home   string
}

// run runs a command and returns what it wrote.
//
// kubectl up to 1.33 begins to read from a websocket before it has made its
// streams, and throws away what a quick server sends meanwhile. It says so, and
// is asked again: client-go waits since, so this is none of the server's.
func (k *kubectl) run(stdin string, args ...string) (string, error) {
	k.t.Helper()
	var out string
	var err error
	for range 5 {
		if out, err = k.once(stdin, args...); !strings.Contains(out, "Unknown stream id") {
			break
		}
	}
	return out, err
}

func (k *kubectl) once(stdin string, args ...string) (string, error) {
	k.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.binary, args...)
	// A command of a moment need not collect its garbage as often as what runs for years.
	cmd.Env = []string{"KUBECONFIG=" + k.config, "HOME=" + k.home, "PATH=" + os.Getenv("PATH"), "GOGC=400"}
	cmd.Stdin = strings.NewReader(stdin)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := cmd.Run()
	return out.String(), err
}

// ok runs a command that must succeed.
func (k *kubectl) ok(stdin string, args ...string) string {
	k.t.Helper()
	out, err := k.run(stdin, args...)
	if err != nil {
		k.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

// fails runs a command that must fail.
func (k *kubectl) fails(stdin string, args ...string) string {
	k.t.Helper()
	out, err := k.run(stdin, args...)
	if err == nil {
		k.t.Fatalf("kubectl %s succeeded:\n%s", strings.Join(args, " "), out)
	}
	return out
}

// eachKubectl runs f in parallel with each kubectl of this machine, each with a replica of its own.
func eachKubectl(t *testing.T, f func(t *testing.T, r *replica, k *kubectl)) {
	all := stockKubectls()
	if len(all) == 0 {
		t.Skip("no stock kubectl on this machine")
	}
	for name, binary := range all {
		t.Run(name, func(t *testing.T) {
			if !*rewrite { // all would write the same files
				t.Parallel()
			}
			r := start(t, nil)
			f(t, r, &kubectl{t: t, binary: binary, config: r.kubeconfig("admin", "system:masters"), home: t.TempDir()})
		})
	}
}

// F1: what is applied again changes nothing: same resourceVersion, and kubectl says so. A pod that was given a token
// volume is "configured" there, because kubectl compares the lengths of lists before
// it sends a patch that changes nothing; so it is with every Kubernetes.
func TestApplyAgain(t *testing.T) {
	data, err := os.ReadFile("testdata/again.yaml")
	if err != nil {
		t.Fatal(err)
	}
	plain := string(data)
	withToken := strings.NewReplacer("automountServiceAccountToken: false", "automountServiceAccountToken: true", "name: one,", "name: two,").Replace(plain)
	eachKubectl(t, func(t *testing.T, r *replica, k *kubectl) {
		versions := func() string {
			return k.ok("", "get", "pods,configmaps", "-o", "jsonpath={.items[*].metadata.resourceVersion}")
		}
		for _, c := range []struct {
			manifest, again string
			flags           []string
		}{
			{plain, "configmap/motd unchanged\npod/one unchanged\n", nil},
			{withToken, "configmap/motd unchanged\npod/two configured\n", nil},
			{plain, "configmap/motd serverside-applied\npod/one serverside-applied\n", []string{"--server-side", "--field-manager=again"}},
			{withToken, "configmap/motd serverside-applied\npod/two serverside-applied\n", []string{"--server-side", "--field-manager=again"}},
		} {
			apply := append([]string{"apply", "-f", "-"}, c.flags...)
			k.ok(c.manifest, apply...)
			before := versions()
			if said := k.ok(c.manifest, apply...); said != c.again {
				t.Errorf("%v again: %q", apply, said)
			}
			if after := versions(); after != before {
				t.Errorf("%v again: versions %s became %s", apply, before, after)
			}
		}
	})
}

// The transcripts in testdata are what a user types and sees. A line beginning
// with "$ " is a command (after "!" one that must fail), "< name" gives it the
// file of that name on its standard input; the lines below are the output, with
// what differs from run to run replaced by <words>. -rewrite writes them anew.
var rewrite = flag.Bool("rewrite", false, "write the transcripts in testdata anew")

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

func settled(out string) string {
	for _, v := range varying {
		out = v.form.ReplaceAllString(out, v.word)
	}
	return strings.TrimSpace(out)
}

// F1, F2, F4, F10, F12, F18, F28, F40: stock kubectl does what its users know.
func TestKubectlTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	eachKubectl(t, func(t *testing.T, r *replica, k *kubectl) {
		files := files
		// What older ones know nothing of. 1.32 was the first.
		if version := k.ok("", "version", "--client"); !strings.Contains(version, "v1.27.") && !strings.Contains(version, "v1.30.") {
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
				kk.t = t
				got := replay(&kk, string(data))
				if *rewrite {
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
					return
				}
				if got != string(data) {
					t.Errorf("the transcript differs:\n%s", cmp.Diff(strings.Split(string(data), "\n"), strings.Split(got, "\n")))
				}
			})
		}
	})
}

// replay runs the commands of a transcript and returns it with their current output.
func replay(k *kubectl, transcript string) string {
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
				k.t.Fatal(err)
			}
			stdin = string(data)
		}
		args := strings.Fields(strings.TrimPrefix(command, "!"))
		said, err := k.run(stdin, args[1:]...)
		if mustFail := strings.HasPrefix(command, "!"); (err != nil) != mustFail {
			k.t.Errorf("%s: %v\n%s", command, err, said)
		}
		out.WriteString(line + "\n" + settled(said) + "\n\n")
	}
	return out.String()
}

// kubectl explains, applies and prints custom objects as it does others.
func TestKubectlOnCustomResources(t *testing.T) {
	eachKubectl(t, func(t *testing.T, r *replica, k *kubectl) {
		r.leadDefinitions()
		k.ok(crontabs, "apply", "--server-side", "-f", "-")
		k.ok("", "wait", "--for=condition=Established", "--timeout=20s", "crd/crontabs.stable.example.com")
		doc := crontab("a", `{"cronSpec":"* * * * *","replicas":2}`)
		expect := func(out string, want ...string) {
			t.Helper()
			for _, w := range want {
				if !strings.Contains(out, w) {
					t.Errorf("no %q in:\n%s", w, out)
				}
			}
		}
		var out string
		r.eventually(func() (err error) { // the models are published a moment later
			out, err = k.run("", "explain", "crontab.spec")
			return err
		})
		expect(out, "CronTab", "cronSpec", "When it runs.")
		expect(k.ok(doc, "apply", "--server-side", "-f", "-"), "crontab.stable.example.com/a serverside-applied")
		expect(k.ok("", "get", "ct"), "SPEC", "REPLICAS", "* * * * *")
		expect(k.ok(strings.Replace(doc, `"replicas":2`, `"replicas":3`, 1), "apply", "--server-side", "-f", "-"), "serverside-applied")
		expect(k.ok("", "get", "ct", "a", "-o", "jsonpath={.spec.replicas}"), "3")
		expect(k.fails(strings.Replace(doc, `"replicas":2`, `"replicas":99`, 1), "apply", "--server-side", "-f", "-"), "should be less than or equal to 10")
		expect(k.ok("", "delete", "ct", "a"), "deleted")
	})
}
