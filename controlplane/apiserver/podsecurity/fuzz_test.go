package podsecurity

import (
	"testing"

	psa "k8s.io/pod-security-admission/api"
)

// FuzzConfig checks that any admission configuration is either rejected or has valid levels.
func FuzzConfig(f *testing.F) {
	f.Add([]byte("apiVersion: pod-security.admission.config.k8s.io/v1\nkind: PodSecurityConfiguration\ndefaults: " +
		"{enforce: baseline, warn-version: v1.25}"))
	f.Add([]byte("apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: " +
		"[{name: PodSecurity, configuration: {}}]"))
	f.Add([]byte("apiVersion: apiserver.config.k8s.io/v1\nkind: AdmissionConfiguration\nplugins: [{name: " +
		"PodSecurity, path: absent}]"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := parseConfig(data, dir)
		if err != nil {
			return
		}
		for _, v := range []psa.LevelVersion{got.Defaults.Enforce, got.Defaults.Audit, got.Defaults.Warn} {
			if _, err := psa.ParseLevel(string(v.Level)); err != nil {
				t.Errorf("%q is taken as %+v", data, got)
			}
		}
	})
}
