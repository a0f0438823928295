package keelson

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// unboundedReads returns the calls of os.ReadFile, io.ReadAll, bufio.NewScanner, bufio.NewReader
// and json.NewDecoder in the non-test files of a folder whose argument is not bounded where the
// call is made.
func unboundedReads(t *testing.T, dir string) map[string][]string {
	t.Helper()
	watched := map[string]bool{"os.ReadFile": true, "ioutil.ReadFile": true, "io.ReadAll": true,
		"bufio.NewScanner": true,
		"json.NewDecoder":  true}
	found := map[string][]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		set := token.NewFileSet()
		file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || !watched[qualifiedName(call.Fun)] || len(call.Args) == 0 {
				return true
			}
			if inner, ok := call.Args[0].(*ast.CallExpr); ok {
				switch qualifiedName(inner.Fun) {
				case "io.LimitReader", "io.NewSectionReader", "bytes.NewReader", "strings.NewReader":
					return true
				}
			}
			found[path] = append(found[path], fmt.Sprintf("%s (line %d)", qualifiedName(call.Fun),
				set.Position(call.Pos()).Line))
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// qualifiedName returns PACKAGE.NAME of an expression of that form, or "".
func qualifiedName(e ast.Expr) string {
	s, ok := e.(*ast.SelectorExpr)
	if !ok {
		return ""
	}
	x, ok := s.X.(*ast.Ident)
	if !ok {
		return ""
	}
	return x.Name + "." + s.Sel.Name
}

// Reasons why a file may read without a limit: no container, image or volume can write the read
// files.
const (
	kernelFile   = "kernel files, whose size the kernel bounds"
	ownFile      = "files that the agent or its shim wrote, in folders that no container can reach"
	operatorFile = "files that the node's administrator wrote"
)

// unboundedAllowed lists each file of the agent and of the CSI code that reads without a limit, and
// what it reads.
var unboundedAllowed = map[string]string{
	"agent/dns/address.go":               operatorFile,
	"agent/dns/configure.go":             ownFile,
	"agent/image/seal.go":                kernelFile,
	"agent/image/transport.go":           operatorFile,
	"agent/network/kernel.go":            kernelFile,
	"agent/network/sendercheck.go":       kernelFile,
	"agent/network/tend.go":              ownFile,
	"agent/node/lastcontact.go":          ownFile,
	"agent/node/machine.go":              kernelFile + "; /etc/os-release: " + operatorFile,
	"agent/oci/podcgroup/cgroup.go":      kernelFile,
	"agent/oci/container.go":             ownFile,
	"agent/oci/endpods.go":               kernelFile,
	"agent/oci/ends.go":                  ownFile,
	"agent/oci/containerspec/host.go":    kernelFile,
	"agent/oci/pause.go":                 ownFile,
	"agent/oci/podcgroup/limits.go":      kernelFile,
	"agent/oci/sandbox.go":               operatorFile,
	"agent/oci/sandbox_stop.go":          kernelFile,
	"agent/oci/podcgroup/tiers.go":       kernelFile,
	"agent/oci/target.go":                ownFile + "; /proc/PID/stat: " + kernelFile,
	"agent/pod/podfiles/evictionfile.go": ownFile,
	"agent/pod/podfiles/grantfile.go":    ownFile,
	"agent/pod/subpath/subpath.go":       kernelFile,
	"agent/policy/enforcer.go":           kernelFile,
	"agent/session/enroll.go":            operatorFile,
	"agent/session/identity.go":          ownFile,
	"agent/session/listens.go":           ownFile,
	"agent/session/replicas.go":          ownFile,
	"agent/session/serving.go":           ownFile,
	"agent/session/tokens.go":            ownFile,
	"agent/stats/own.go":                 kernelFile,
	"agent/volume/attach.go":             ownFile,
	"agent/volume/csi.go":                ownFile,
	"agent/volume/iscsi/state.go":        ownFile,
	"agent/volume/nfs/nfs.go":            kernelFile,
	"agent/volume/records.go":            ownFile,
	"agent/volume/sole.go":               ownFile,
	"cmd/oci/main.go":                    ownFile,
	"csi/local/group.go":                 ownFile,
	"csi/local/record.go":                ownFile,
}

// A container must not be able to make the agent read without a limit. A read must use
// safepath.ReadFile or io.LimitReader, or its file is listed above with the reason why no container
// can write the read files. F93
func TestReadsOfTheAgentAreBounded(t *testing.T) {
	found := map[string][]string{}
	for _, dir := range []string{"agent", "csi", "cmd/oci", "cmd/shim"} {
		for file, calls := range unboundedReads(t, dir) {
			if !strings.HasPrefix(file, "agent/fake/") && !strings.Contains(filepath.Dir(file), "test") {
				found[file] = calls
			}
		}
	}
	for file, calls := range found {
		if unboundedAllowed[file] == "" {
			t.Errorf("%s reads without a limit: %s: use safepath.ReadFile or io.LimitReader, or list it in "+
				"unboundedAllowed",
				file, strings.Join(calls, ", "))
		}
	}
	for file := range unboundedAllowed {
		if found[file] == nil {
			t.Errorf("%s does not read without a limit: remove it from unboundedAllowed", file)
		}
	}
}
