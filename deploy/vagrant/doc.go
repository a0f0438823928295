// Package vagrant contains the Vagrantfile for the machines of a cluster file. It has only tests.
package vagrant
