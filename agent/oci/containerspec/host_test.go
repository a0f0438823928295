package containerspec

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A profile that is not loaded into the kernel is rejected, with its name in the error.
func TestAppArmorProfiles(t *testing.T) {
	file := filepath.Join(t.TempDir(), "profiles")
	if err := os.WriteFile(file, []byte("/usr/bin/man (enforce)\nk8s-app (complain)\nwith space (v2) (enforce)\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	h := Host{AppArmor: true, profilesFile: file}
	for profile, want := range map[string]string{"k8s-app": "", "/usr/bin/man": "", "with space (v2)": "",
		"unconfined": "", ":other://app": "",
		"k8s": "is not loaded", "": "is not loaded", "with space": "is not loaded"} {
		if err := h.checkAppArmorProfile(profile); want == "" && err != nil ||
			want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", profile, err, want)
		}
	}
	h.profilesFile += "x"
	if err := h.checkAppArmorProfile("k8s-app"); err == nil || !strings.Contains(err.Error(), "securityfs") {
		t.Errorf("without a list: %v", err)
	}
}
