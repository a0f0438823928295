package machines

import (
	"crypto/x509"
	"encoding/pem"
	"strings"

	"go.yaml.in/yaml/v3"
)

// IsValidHostName reports whether a cluster file can use the name. Daemons that were started by
// hand may have names with dots or capitals.
func IsValidHostName(name string) bool { return hostName.MatchString(name) }

// ReplicaName returns the name of a machine's replica: from its settings, or else the hostname. It
// is "" if it is unknown, for example without settings.
func (f Facts) ReplicaName() string {
	name, ok := settingValues(f.ControlPlane, "name")
	switch {
	case !ok:
		return ""
	case len(name) > 0:
		return name[0]
	}
	return f.Hostname
}

// AgentName returns the name of a machine's node: from its certificate, which never changes, from
// its settings, or else the hostname. It is "" if it is unknown.
func (f Facts) AgentName() string {
	name, ok := settingValues(f.Agent, "node-name")
	switch {
	case f.NodeName != "":
		return f.NodeName
	case !ok:
		return ""
	case len(name) > 0:
		return name[0]
	}
	return strings.ToLower(f.Hostname)
}

// AgentServers returns the replicas in the settings of a machine's agent, each as HOST:PORT.
func (f Facts) AgentServers() (out []string) {
	all, _ := settingValues(f.Agent, "server")
	for _, one := range all {
		for part := range strings.SplitSeq(one, ",") {
			if part = strings.TrimSpace(part); part != "" {
				out = append(out, part)
			}
		}
	}
	return out
}

// settingValues returns the value of a key in a settings file: one text, a list, or nothing. ok is
// false if the file is missing or cannot be parsed.
func settingValues(file, key string) (value []string, ok bool) {
	if strings.TrimSpace(file) == "" {
		return nil, false
	}
	var all map[string]yaml.Node
	if err := yaml.Unmarshal([]byte(file), &all); err != nil {
		return nil, false
	}
	of := all[key]
	if of.Kind == yaml.ScalarNode && of.Value != "" {
		return []string{of.Value}, true
	}
	for _, one := range of.Content {
		if of.Kind == yaml.SequenceNode && one.Kind == yaml.ScalarNode && one.Value != "" {
			value = append(value, one.Value)
		}
	}
	return value, true
}

// nodeName returns the node name in a certificate, or "" if it is not a node certificate.
func nodeName(certificate string) string {
	block, _ := pem.Decode([]byte(certificate))
	if block == nil {
		return ""
	}
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return ""
	}
	name, ok := strings.CutPrefix(c.Subject.CommonName, "system:node:")
	if !ok {
		return ""
	}
	return name
}
