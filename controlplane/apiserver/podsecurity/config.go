package podsecurity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"
	"sigs.k8s.io/yaml"
)

// Config contains the default Pod Security policy for namespaces without labels, and the
// exemptions.
type Config struct {
	Defaults       psa.Policy
	Usernames      []string
	Namespaces     []string
	RuntimeClasses []string
}

// Default returns the configuration with the level privileged and no exemptions.
func Default() Config {
	privileged := psa.LevelVersion{Level: psa.LevelPrivileged, Version: psa.LatestVersion()}
	return Config{Defaults: psa.Policy{Enforce: privileged, Audit: privileged, Warn: privileged}}
}

const (
	configKind    = "PodSecurityConfiguration"
	configVersion = "pod-security.admission.config.k8s.io/v1"
	listKind      = "AdmissionConfiguration"
	listVersion   = "apiserver.config.k8s.io/v1"
	pluginName    = "PodSecurity"
)

// podSecurityFile is a PodSecurityConfiguration as a file contains it.
type podSecurityFile struct {
	metav1.TypeMeta `json:",inline"`
	Defaults        struct {
		Enforce        string `json:"enforce,omitempty"`
		EnforceVersion string `json:"enforce-version,omitempty"`
		Audit          string `json:"audit,omitempty"`
		AuditVersion   string `json:"audit-version,omitempty"`
		Warn           string `json:"warn,omitempty"`
		WarnVersion    string `json:"warn-version,omitempty"`
	} `json:"defaults"`
	Exemptions struct {
		Usernames      []string `json:"usernames,omitempty"`
		Namespaces     []string `json:"namespaces,omitempty"`
		RuntimeClasses []string `json:"runtimeClasses,omitempty"`
	} `json:"exemptions"`
}

// admissionFile is an AdmissionConfiguration as a file contains it: it contains or references the
// configurations of admission plugins.
type admissionFile struct {
	metav1.TypeMeta `json:",inline"`
	Plugins         []struct {
		Name          string          `json:"name"`
		Path          string          `json:"path,omitempty"`
		Configuration json.RawMessage `json:"configuration,omitempty"`
	} `json:"plugins"`
}

// Load reads a PodSecurityConfiguration from a file. The file may also be an AdmissionConfiguration
// that contains or references it. If path is empty, Load returns Default().
func Load(path string) (Config, error) {
	if path == "" {
		return Default(), nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return Config{}, fmt.Errorf("reading the admission configuration: %w", err)
	}
	c, err := parseConfig(data, filepath.Dir(path))
	if err != nil {
		return Config{}, fmt.Errorf("admission configuration %s: %w", path, err)
	}
	return c, nil
}

func parseConfig(data []byte, dir string) (Config, error) {
	var kind metav1.TypeMeta
	if err := yaml.Unmarshal(data, &kind); err != nil {
		return Config{}, err
	}
	switch {
	case kind.Kind == configKind && kind.APIVersion == configVersion:
		return parseOne(data)
	case kind.Kind == listKind && kind.APIVersion == listVersion:
	default:
		return Config{}, fmt.Errorf("it is a %q of %q; want an %s of %s or a %s of %s",
			kind.Kind, kind.APIVersion, listKind, listVersion, configKind, configVersion)
	}
	var l admissionFile
	if err := yaml.UnmarshalStrict(data, &l); err != nil {
		return Config{}, err
	}
	out := Default()
	for i, p := range l.Plugins {
		if p.Name != pluginName {
			return Config{}, fmt.Errorf("plugins[%d]: %q has no configuration here; only %s has", i, p.Name, pluginName)
		}
		one := []byte(p.Configuration)
		if p.Path != "" {
			if len(one) > 0 {
				return Config{}, fmt.Errorf("plugins[%d]: path and configuration are mutually exclusive", i)
			}
			if !filepath.IsAbs(p.Path) {
				p.Path = filepath.Join(dir, p.Path)
			}
			var err error
			if one, err = os.ReadFile(p.Path); err != nil {
				return Config{}, fmt.Errorf("plugins[%d]: %w", i, err)
			}
		}
		var err error
		if out, err = parseOne(one); err != nil {
			return Config{}, fmt.Errorf("plugins[%d]: %w", i, err)
		}
	}
	return out, nil
}

func parseOne(data []byte) (Config, error) {
	if len(bytes.TrimSpace(data)) == 0 {
		return Default(), nil
	}
	var f podSecurityFile
	if err := yaml.UnmarshalStrict(data, &f); err != nil {
		return Config{}, err
	}
	if f.Kind != configKind || f.APIVersion != configVersion {
		return Config{}, fmt.Errorf("it is a %q of %q; want a %s of %s", f.Kind, f.APIVersion,
			configKind, configVersion)
	}
	var errs field.ErrorList
	at := field.NewPath("defaults")
	mode := func(name, level, version string) psa.LevelVersion {
		lv := psa.LevelVersion{Level: psa.LevelPrivileged, Version: psa.LatestVersion()}
		var err error
		if level != "" {
			if lv.Level, err = psa.ParseLevel(level); err != nil {
				errs = append(errs, field.Invalid(at.Child(name), level, err.Error()))
			}
		}
		if version != "" {
			if lv.Version, err = psa.ParseVersion(version); err != nil {
				errs = append(errs, field.Invalid(at.Child(name+"-version"), version, err.Error()))
			}
		}
		return lv
	}
	c := Config{
		Defaults: psa.Policy{
			Enforce: mode("enforce", f.Defaults.Enforce, f.Defaults.EnforceVersion),
			Audit:   mode("audit", f.Defaults.Audit, f.Defaults.AuditVersion),
			Warn:    mode("warn", f.Defaults.Warn, f.Defaults.WarnVersion),
		},
		Usernames: f.Exemptions.Usernames, Namespaces: f.Exemptions.Namespaces,
		RuntimeClasses: f.Exemptions.RuntimeClasses,
	}
	return c, append(errs, validateExemptions(&f)...).ToAggregate()
}

func validateExemptions(config *podSecurityFile) (errs field.ErrorList) {
	at := field.NewPath("exemptions")
	check := func(name string, values []string, form func(string) []string) {
		seen := map[string]bool{}
		for i, v := range values {
			for _, why := range form(v) {
				errs = append(errs, field.Invalid(at.Child(name).Index(i), v, why))
			}
			if seen[v] {
				errs = append(errs, field.Duplicate(at.Child(name).Index(i), v))
			}
			seen[v] = true
		}
	}
	check("usernames", config.Exemptions.Usernames, func(s string) []string {
		if s == "" {
			return []string{"username must not be empty"}
		}
		return nil
	})
	check("namespaces", config.Exemptions.Namespaces, func(s string) []string {
		return validation.ValidateNamespaceName(s, false)
	})
	check("runtimeClasses", config.Exemptions.RuntimeClasses,
		func(s string) []string { return validation.NameIsDNSSubdomain(s, false) })
	return errs
}
