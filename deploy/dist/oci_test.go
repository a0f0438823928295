package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The command line of keelson-oci's build in scripts/dist, with tags and linker flags.
var ofOCI = regexp.MustCompile(`build -tags (\S+) -ldflags '([^']*)' -o "\$to/keelson-oci" (\S+)`)

// keelson-oci is identical wherever the checkout is. For another architecture, scripts/dist passes
// folders below the checkout to the C compiler. cgo writes these paths into its output, and
// -trimpath does not remove them.
func TestOCIIsReproducible(t *testing.T) {
	for program, why := range map[string]string{"gcc": "which compiles what of keelson-oci is C",
		"pkg-config": "which finds libseccomp"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("needs: %s, %s", program, why)
		}
	}
	if err := exec.Command("pkg-config", "--exists", "libseccomp").Run(); err != nil {
		t.Skip("needs: libseccomp-dev, which keelson-oci is linked to")
	}
	script, err := os.ReadFile("../../scripts/dist")
	if err != nil {
		t.Fatal(err)
	}
	flags := ofOCI.FindSubmatch(script)
	if flags == nil {
		t.Fatalf("scripts/dist has no line like %s", ofOCI)
	}
	var first []byte
	for range 2 {
		cross := t.TempDir()
		program := filepath.Join(cross, "keelson-oci")
		build := exec.Command("go", "build", "-tags", string(flags[1]), "-ldflags", string(flags[2]), "-o", program,
			string(flags[3]))
		build.Dir = "../.."
		build.Env = append(os.Environ(), "GOFLAGS=-trimpath", "CGO_ENABLED=1", "CGO_CFLAGS=-O2 -I"+cross+"/include",
			"CGO_LDFLAGS=-L"+cross+"/lib")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		content, err := os.ReadFile(program)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = content
		}
		if !bytes.Equal(first, content) {
			t.Errorf("keelson-oci differs with the folder of the libraries of C: %d and %d bytes",
				len(first), len(content))
		}
	}
}

// scripts/dist reads the version of the linked C library from the compiler; it equals the version
// that this machine's library reports.
func TestVersionOfGlibc(t *testing.T) {
	want, err := exec.Command("getconf", "GNU_LIBC_VERSION").Output()
	if _, missing := exec.LookPath("gcc"); err != nil || missing != nil {
		t.Skip("needs: gcc and glibc, which keelson-oci is linked to")
	}
	script, err := os.ReadFile("../../scripts/dist")
	if err != nil {
		t.Fatal(err)
	}
	function := regexp.MustCompile(`(?ms)^glibc\(\) \{.*?^\}$`).Find(script)
	for compiler, want := range map[string]string{"gcc": strings.TrimPrefix(string(want), "glibc "), "echo": ""} {
		// echo is not a compiler
		said, err := exec.Command("bash", "-euo", "pipefail", "-c", string(function)+"\nglibc "+compiler).Output()
		if string(said) != want || (err == nil) != (want != "") {
			t.Errorf("%s: %q, %v, want %q", compiler, said, err, want)
		}
	}
}
