package upstream

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var listAll = flag.Bool("list", false, "print every difference, also the allowed ones")

// F40: every path, operation, parameter, response, definition and extension of a served group
// version equals that of Kubernetes, except for the differences of allowed.txt.
func TestDocumentsEqualThoseOfKubernetes(t *testing.T) {
	ours, theirs := writeOurDocuments(t), kubernetesDocuments(t)
	served := map[string]bool{} // "api__v1", "apis__apps__v1", and their groups
	for _, file := range v3Files(t, ours) {
		name := strings.TrimSuffix(file, "_openapi.json")
		served[name] = true
	}
	for name := range served {
		if parts := strings.Split(name, "__"); len(parts) == 3 {
			served["apis__"+parts[1]] = true
		}
	}
	got := compareV2(t, ours, theirs, served)
	compared := 0
	for _, file := range v3Files(t, filepath.Join(theirs, "v3")) {
		name := strings.TrimSuffix(file, "_openapi.json")
		where := "v3/" + strings.ReplaceAll(name, "__", "/")
		data, err := os.ReadFile(filepath.Join(ours, file))
		switch {
		case err != nil && strings.HasPrefix(name, "apis__") && !served[name]: // a group or version that is not served
		case err != nil:
			got = append(got, where+": is missing")
		default:
			got = append(got, differences(where, decodeDocument(t, data),
				readDocument(t, filepath.Join(theirs, "v3", file)))...)
			compared++
		}
	}
	if compared < 20 {
		t.Errorf("only %d v3 documents were compared", compared)
	}
	checkAllowed(t, got)
}

// compareV2 returns the differences of the v2 documents, as far as their group versions are served.
func compareV2(t *testing.T, ours, theirs string, served map[string]bool) []string {
	o, k := readDocument(t, filepath.Join(ours, "v2.json")), readDocument(t, filepath.Join(theirs, "swagger.json"))
	ofKubernetes := map[string]bool{}
	for _, file := range v3Files(t, filepath.Join(theirs, "v3")) {
		ofKubernetes[strings.TrimSuffix(file, "_openapi.json")] = true
	}
	isOf := func(groups map[string]bool) func(path string) bool {
		return func(path string) bool {
			parts := strings.Split(strings.Trim(path, "/"), "/")
			switch {
			case parts[0] != "apis" || len(parts) < 2:
				return true
			case len(parts) == 2:
				return groups["apis__"+parts[1]]
			}
			return groups[strings.Join(parts[:3], "__")]
		}
	}
	o.keepServed(isOf(ofKubernetes)) // Keelson also serves its own versions
	k.keepServed(isOf(served))
	return differences("v2", o, k)
}

// allowedPattern is a line of allowed.txt: a pattern and the number of differences that it must
// match.
type allowedPattern struct {
	count   int
	pattern *regexp.Regexp
	line    int
}

// checkAllowed fails the test for each difference that matches no pattern, and for each pattern
// that does not match exactly its number of differences.
func checkAllowed(t *testing.T, got []string) {
	t.Helper()
	allowed := readAllowed(t)
	found := make([]int, len(allowed))
	for _, d := range got {
		i := slices.IndexFunc(allowed, func(a allowedPattern) bool { return a.pattern.MatchString(d) })
		if i >= 0 {
			found[i]++
		}
		if i < 0 {
			t.Error(d)
		} else if *listAll {
			fmt.Println("allowed:", d)
		}
	}
	for i, a := range allowed {
		if found[i] != a.count {
			t.Errorf("allowed.txt:%d: %s matches %d differences, not %d: the list may only shrink",
				a.line, a.pattern, found[i], a.count)
		}
	}
}

// readAllowed returns the lines of allowed.txt. A comment with the reason stands above each block
// of lines.
func readAllowed(t *testing.T) (out []allowedPattern) {
	t.Helper()
	data, err := os.ReadFile("allowed.txt")
	if err != nil {
		t.Fatal(err)
	}
	reason := false
	for i, line := range strings.Split(string(data), "\n") {
		count, pattern, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case count == "":
			reason = false
		case strings.HasPrefix(count, "#"):
			reason = true
		default:
			n, err := strconv.Atoi(count)
			if err != nil || n <= 0 || !reason {
				t.Fatalf("allowed.txt:%d: want a number above 0 and a pattern, below a comment with the reason", i+1)
			}
			out = append(out, allowedPattern{n, regexp.MustCompile("^" + strings.TrimSpace(pattern) + "$"), i + 1})
		}
	}
	return out
}

// writeOurDocuments returns a folder with the documents of this release.
func writeOurDocuments(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	runGo(t, "../../..", "run", "./test/openapi", dir)
	return dir
}

// kubernetesDocuments returns the folder api/openapi-spec of the required release of Kubernetes.
func kubernetesDocuments(t *testing.T) string {
	t.Helper()
	var module struct{ Dir string }
	if err := json.Unmarshal(runGo(t, ".", "mod", "download", "-json", "k8s.io/kubernetes"), &module); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(module.Dir, "api", "openapi-spec")
}

// runGo returns the output of the go command.
func runGo(t *testing.T, dir string, args ...string) []byte {
	t.Helper()
	c := exec.Command("go", args...)
	c.Dir, c.Stderr = dir, os.Stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("go %v: %v %s", args, err, out)
	}
	return out
}

// v3Files returns the names of the v3 documents in a folder.
func v3Files(t *testing.T, dir string) (out []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*_openapi.json"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s has no documents: %v", dir, err)
	}
	for _, p := range paths {
		out = append(out, filepath.Base(p))
	}
	return out
}

func readDocument(t *testing.T, file string) *document {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return decodeDocument(t, data)
}

func decodeDocument(t *testing.T, data []byte) *document {
	t.Helper()
	d, err := newDocument(data)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
