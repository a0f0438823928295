package machines

import (
	"crypto/x509"
	"encoding/pem"
	"strings"

	"go.yaml.in/yaml/v3"
)

// IsValidHostName reports whether name can be the name of a host in a cluster file: lower-case
// letters, digits, and hyphens. Replicas and nodes that were set up by hand may have other names.
func IsValidHostName(name string) bool { return hostName.MatchString(name) }

// ReplicaName returns the name that the machine's replica has according to its settings file: the
// setting "name", or else the hostname. It returns "" if there is no readable settings file.
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

// AgentName returns the name of the machine's node. It is the name in the node certificate, which
// never changes. Without a certificate, it is the setting "node-name" or else the hostname, in
// lower case. It returns "" if there is neither a certificate nor a readable settings file.
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

// AgentServers returns the addresses of replicas, each as HOST:PORT, in the settings file of the
// machine's agent. They are the values of the setting "server".
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

// settingValues returns the value of a key in a settings file: a scalar as one element, or a list.
// The value is empty if the key is not set. The argument file is the content of the settings file.
// The result ok is false if the content is empty or invalid.
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

// nodeName returns the node name in the subject of a PEM certificate (system:node:NAME), or "" if
// it is not a node certificate.
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
